"""The shipped EAGLE-3 head in float32: every method of it gives plain decoding's text."""

from __future__ import annotations

from typing import Any

import pytest
from hydra.utils import instantiate
from stages_kit import composed

from blockpilot.base.paths import conf_dir
from blockpilot.decoding.divergence import EXACT_MARGIN, divergence
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.generate import Pair, open_pair
from blockpilot.policies.fixed import FixedPolicy
from blockpilot.prompts.bundled import BundledSet
from blockpilot.prompts.render import render

METHODS = sorted(file.stem for file in (conf_dir() / "method").glob("eagle3_*.yaml"))
N_PROMPTS, BUDGET = 2, 16


@pytest.fixture(scope="module")
def pair() -> Pair:
    return open_pair("dtype=float32")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", METHODS)
def test_it_drafts_for_its_target_and_the_text_is_plain_decodings(
    pair: Pair, name: str, temperature: float
) -> None:
    cfg = composed("sweep", "run_id=run", "mode=decode", f"method=[{name}]")
    parts: Any = instantiate(cfg.methods[name], _convert_="all")
    method = Method(parts["drafter"], parts["policy"])
    plain = Method(pair.method.drafter, FixedPolicy(block_size=1, block_mode="draft"))
    for each in (method, plain):
        each.bind(pair.target)
    formats = dict.fromkeys(("maths", "chat", "code"), "{turn}")
    questions = BundledSet(name="bundled", held_out=False, formats=formats).load()
    cycles = committed = 0
    for question in questions[:: len(questions) // N_PROMPTS][:N_PROMPTS]:
        message = [{"role": "user", "content": question.turns[0]}]
        ids = render(pair.target.tokenizer, message, None, "2025-01-01")
        sampler = KeyedSampler(temperature=temperature, prompt_hashes=[question.hash])
        traces = [decode(pair.target, each, ids, sampler, BUDGET) for each in (method, plain)]
        texts = [trace.tokens for trace in traces]
        parted = divergence(pair.target, ids, texts[1], texts[0], sampler)
        assert parted is None or parted.margin < EXACT_MARGIN, "only a tie may do this"
        cycles += len(traces[0].committed)
        committed += sum(traces[0].committed)
    assert committed > 1.2 * cycles, "else the head was not at work"
