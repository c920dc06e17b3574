"""Replay against decoding on the local pair in float32: shipped drafter, real prompts."""

from __future__ import annotations

import pytest
import torch

from blockpilot.decoding.answers import answer
from blockpilot.decoding.divergence import EXACT_MARGIN, divergence
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.replay import replay
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.types import Block
from blockpilot.generate import Pair, open_pair
from blockpilot.policies.fixed import FixedPolicy
from blockpilot.prompts.bundled import BundledSet
from blockpilot.prompts.render import render

N_PROMPTS, BUDGET = 4, 14
PLANS = [Block(6, 6), Block(10, 10), Block(8, 4)]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return open_pair("dtype=float32")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replay_equals_decode_on_real_prompts(pair: Pair, temperature: float) -> None:
    target, drafter = pair.target, pair.method.drafter
    formats = dict.fromkeys(("maths", "chat", "code"), "{turn}")
    questions = BundledSet(name="bundled", held_out=False, formats=formats).load()
    chosen = questions[:: len(questions) // N_PROMPTS][:N_PROMPTS]
    prompts = [
        render(target.tokenizer, [{"role": "user", "content": q.turns[0]}], None, "2025-01-01")
        for q in chosen
    ]
    hashes = [q.hash for q in chosen]
    sampler = KeyedSampler(temperature=temperature, prompt_hashes=hashes)
    said = answer(target, prompts, sampler, BUDGET, drafter.feature_layers)
    cycles = committed = compared = 0
    for ids, name, one in zip(prompts, hashes, said, strict=True):
        text = torch.tensor([*ids, *one.tokens])
        found = replay(drafter, text, len(ids), one.features, PLANS, chunk=64)
        for plan in PLANS:
            mode = "draft" if plan.drafted == plan.verified else "verify"
            policy = FixedPolicy(block_size=plan.verified, block_mode=mode)
            method = Method(drafter, policy)
            method.bind(target)
            alone = KeyedSampler(temperature=temperature, prompt_hashes=[name])
            trace = decode(target, method, ids, alone, BUDGET)
            parted = divergence(target, ids, one.tokens, trace.tokens, alone)
            if parted is not None:  # two texts: nothing to compare, but only a tie may do this
                assert parted.margin < EXACT_MARGIN, (plan, parted)
                continue
            replayed = found.trace(plan, one.tokens, one.stop_reason)
            assert replayed.committed == trace.committed, (name, plan)
            cycles, committed = cycles + len(trace.committed), committed + sum(trace.committed)
            compared += 1
    assert compared >= 2 * N_PROMPTS, "ties are rare"
    assert committed > 1.2 * cycles, "else the drafter was not at work"
