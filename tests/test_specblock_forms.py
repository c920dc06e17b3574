"""The form of SpecBlock drafters on disk, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_kit import tiny_target
from safetensors.torch import load_file
from specblock_kit import TABLE, drafter_of, published, write

from blockpilot.base.errors import UserError
from blockpilot.drafters.forms.checkpoints import save_checkpoint
from blockpilot.drafters.specblock import SpecBlockDrafter, load_specblock, random_specblock
from blockpilot.drafters.specblock_net import SpecBlockConfig, SpecBlockNetwork


def refused(folder: Path | str, *told: str, kind: str = "llama") -> None:
    with pytest.raises(UserError) as caught:
        drafter_of(Path(folder)).bind(tiny_target(kind))
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in told), str(caught.value)


def test_a_drafter_survives_being_saved(tmp_path: Path) -> None:
    target, (_, raw) = tiny_target(), published()
    network = random_specblock(target).bfloat16().float()
    save_checkpoint(network, network.config.published(), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == raw
    again = load_specblock(str(tmp_path), target)
    assert again.config.published() == raw
    for name, tensor in network.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_at_the_width_of_the_local_target_it_takes_32_mb(tmp_path: Path) -> None:
    config = SpecBlockConfig.parse(
        published()[1]
        | {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "vocab_size": 49152,
            "draft_vocab_size": 10300,
        },
        "x",
        30,
    )
    save_checkpoint(SpecBlockNetwork(config), config.published(), tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert 31e6 < size <= 32e6
    assert load_file(tmp_path / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["fc.weight", "d2t", "shift.weight", "rank_head.outer.weight"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    state, raw = published()
    lacking = {key: tensor for key, tensor in state.items() if key != name}
    refused(write(tmp_path, lacking, raw), f"tensor {name} is missing")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("vocab_size", 77, "vocab_size=77, the target has 61"),
        ("hidden_size", 64, "hidden_size=64, the target has 32"),
        ("hidden_size", "32", "hidden_size=32 must be an integer"),
        ("num_slots", 0, "num_slots=0, allowed are >= 1"),
        ("num_slots", None, "lacks the key num_slots"),
        ("num_slots", 5, "tensor queries has shape [4, 32]"),
        ("draft_vocab_size", 19, "draft_vocab_size=19, allowed are >= 20"),
        ("target_layer_ids", None, "lacks the key target_layer_ids"),
        ("target_layer_ids", [1, 1, 3], "hold the last one"),
        ("target_layer_ids", [1, 1], "tensor fc.weight has shape [32, 96]"),
        ("num_hidden_layers", 1, "num_hidden_layers=1, allowed is 2"),
        ("architectures", ["SpecBlockModel"], "architectures=['SpecBlockModel']"),
        ("rank_table", [2, 4], "rank_table=[2, 4], which is not known here"),
        ("attention_bias", True, "attention_bias=True, allowed is False"),
    ],
)
def test_a_config_of_something_else_is_refused(
    key: str, value: Any, told: str, tmp_path: Path
) -> None:
    state, raw = published()
    refused(write(tmp_path, state, {**raw, key: value}), told, str(tmp_path))


def test_a_draft_vocabulary_that_cannot_be_is_refused(tmp_path: Path) -> None:
    state, raw = published()
    far = {**state, "d2t": state["d2t"] + 60}
    refused(write(tmp_path / "far", far, raw), "outside the target's vocabulary")
    other = {**state, "t2d": ~state["t2d"]}
    refused(write(tmp_path / "other", other, raw), "t2d does not hold the tokens")


def test_code_in_a_pickle_is_never_run(tmp_path: Path) -> None:
    state, raw = published()
    folder = write(tmp_path, {}, raw)
    (folder / "model.safetensors").unlink()
    torch.save({**state, "more": print}, folder / "pytorch_model.bin")
    refused(folder, "tensor queries is missing")


def test_settings_that_cannot_be_are_refused() -> None:
    for key, value, told in (
        ("blocks", 0, "drafter.blocks=0: allowed are numbers >= 1"),
        ("block_size", 1, "drafter.block_size=1: allowed are numbers >= 2"),
        ("alternatives", [2, 4], r"drafter.alternatives=\[2, 4\]: allowed are one number"),
        ("alternatives", [2, 4, -1, 0], r"alternatives=\[2, 4, -1, 0\]: allowed are"),
        ("alternatives", [0], r"alternatives=\[0\]: allowed are numbers >= 1"),
    ):
        with pytest.raises(UserError, match=told):
            drafter_of(Path("random"), **{key: value})
    nothing = SpecBlockDrafter(
        checkpoint=None, ignore_keys=[], blocks=1, alternatives=[1], adapt=None, block_size=4
    )
    with pytest.raises(UserError, match=r"checkpoint=null: no SpecBlock drafter of .* is known"):
        nothing.bind(tiny_target())


def test_what_shapes_its_drafts_is_in_its_fingerprint() -> None:
    """Rows of another tree under the same weights would be taken for these."""
    seen = set()
    for n_blocks, table in ((1, TABLE), (2, TABLE), (2, [4])):
        drafter = drafter_of(Path("random"), blocks=n_blocks, alternatives=table)
        drafter.bind(tiny_target())
        seen.add(drafter.fingerprint)
    assert len(seen) == 3
