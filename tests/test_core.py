"""The core decodes without any configuration: a target and a drafter from folders, one call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from decoding_kit import tiny_target
from stages_kit import environment

from blockpilot.drafters.dflash_load import random_network, save_network

SCRIPT = """
import sys
import torch
from blockpilot.decoding.loading import pretrained_target
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.target import Target
from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.drafters.none import NoDrafter
from blockpilot.policies.fixed import FixedPolicy

target = pretrained_target("target", dtype=torch.float64)
drafter = DFlashDrafter(checkpoint="drafter", ignore_keys=[], head=None)
method = Method(drafter, FixedPolicy(block_size=8, block_mode="draft")).bind(target)
ids = [5, 17, 3, 42, 8]
drafted = decode(target, method, ids, max_new_tokens=24)

loaded = Target(target.model, target.tokenizer)
alone = Method(NoDrafter(), FixedPolicy(block_size=1, block_mode="draft")).bind(loaded)
assert decode(loaded, alone, ids, max_new_tokens=24).tokens == drafted.tokens
assert len(drafted.tokens) > 1
assert not {"hydra", "omegaconf"} & set(sys.modules), "the core needs no configuration"
"""


def test_a_target_and_a_drafter_from_folders_decode_in_one_call(tmp_path: Path) -> None:
    target = tiny_target("qwen3")
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    save_network(random_network(target), tmp_path / "drafter")
    subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment(), timeout=240, check=True
    )
