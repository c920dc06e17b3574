"""Where outputs part and how close the call was: exact in float32, within rounding in bf16."""

from __future__ import annotations

import copy
import math
from functools import cache

import pytest
import torch
from decoding_kit import PROMPT, VOCAB, plain, sampler, scripted, tiny_target
from torch import Tensor

from blockpilot.decoding.divergence import EXACT_MARGIN, Divergence, divergence
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.target import Target
from blockpilot.decoding.types import Trace

BUDGET = 40


def exact_scores(target: Target, tokens: list[int], choose: KeyedSampler) -> Tensor:
    """Perturbed scores [n, V] of the positions of `tokens`, by one float64 forward, no cache."""
    model = copy.deepcopy(target.model).double()
    ids = torch.tensor([PROMPT + tokens])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    places = torch.arange(len(tokens)) + len(PROMPT)
    return choose.scores(logits, places)


# --- hand-made outputs -------------------------------------------------------------------------


@cache
def text(temperature: float) -> tuple[int, ...]:
    return tuple(plain(tiny_target(), 12, sampler(temperature)).tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_equal_outputs_do_not_diverge(temperature: float) -> None:
    tokens = text(temperature)
    assert divergence(tiny_target(), PROMPT, tokens, list(tokens), sampler(temperature)) is None
    assert divergence(tiny_target(), PROMPT, [], [], sampler(temperature)) is None


@pytest.mark.parametrize("index", [0, 1, 7, 11])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_first_difference_and_its_margin(temperature: float, index: int) -> None:
    target, choose = tiny_target(), sampler(temperature)
    tokens = list(text(temperature))
    other = [*tokens]
    for place in {index, 11}:  # a later difference does not matter
        other[place] = (other[place] + 5) % VOCAB
    found = divergence(target, PROMPT, tokens, other, choose)
    scores = exact_scores(target, tokens, choose)[index]
    want = float(scores[tokens[index]] - scores[other[index]])
    assert want > 0
    assert found is not None
    assert found.index == index
    assert found.margin == pytest.approx(want, abs=1e-9)
    swapped = divergence(target, PROMPT, other, tokens, choose)
    assert swapped is not None
    assert swapped.index == index
    assert swapped.margin == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize("length", [0, 5, 11])
def test_an_output_that_ends_early_has_no_excuse(length: int) -> None:
    tokens = text(0.0)
    want = Divergence(length, math.inf)
    assert divergence(tiny_target(), PROMPT, tokens, tokens[:length], sampler()) == want
    assert divergence(tiny_target(), PROMPT, tokens[:length], tokens, sampler()) == want


def test_measuring_a_divergence_does_not_disturb_the_next_decode() -> None:
    """It runs the target without the capture that the drafter asked for."""
    target = tiny_target()
    tokens = list(text(0.0))
    other = [*tokens[:3], (tokens[3] + 1) % VOCAB]
    assert divergence(target, PROMPT, tokens, other, sampler()) is not None
    assert scripted(target, tokens, 4, 12).tokens == tokens


# --- real arithmetic ---------------------------------------------------------------------------


def block_texts(dtype: torch.dtype) -> list[tuple[Target, KeyedSampler, Trace, Trace]]:
    """Plain and block decoding with half of the drafts wrong, over targets and temperatures."""
    found = []
    for kind in ("llama", "qwen3"):
        for temperature in (0.0, 1.0):
            target, choose = tiny_target(kind, dtype=dtype), sampler(temperature)
            reference = plain(target, BUDGET, choose)
            block = scripted(
                target, reference.tokens, 8, BUDGET, lambda c: [c % 7] if c % 2 else [], choose
            )
            found.append((target, choose, reference, block))
    return found


def test_float32_is_exact_or_within_rounding() -> None:
    for target, choose, reference, block in block_texts(torch.float32):
        found = divergence(target, PROMPT, reference.tokens, block.tokens, choose)
        assert found is None or found.margin < EXACT_MARGIN


def test_every_bf16_token_is_the_best_within_rounding() -> None:
    """The margin is 4 steps of bf16 at the size of the largest logit, 2^-8 of it each.

    Measured are up to 2 steps. The runner-up is rarely as close, so a wrong token would show.
    """
    near = total = 0
    for target, choose, reference, block in block_texts(torch.bfloat16):
        for trace in (reference, block):
            assert len(trace.tokens) == BUDGET
            logits = exact_scores(target, trace.tokens, sampler())
            margin = 4 * 2**-8 * float(logits.abs().max())
            scores = exact_scores(target, trace.tokens, choose)
            best, second = scores.topk(2, dim=-1).values.unbind(dim=-1)
            chosen = scores.gather(1, torch.tensor(trace.tokens)[:, None])[:, 0]
            assert float((best - chosen).max()) < margin
            near += int((best - second < margin).sum())
            total += BUDGET
        found = divergence(target, PROMPT, reference.tokens, block.tokens, choose)
        assert found is None or found.margin < margin
    assert near < 0.2 * total
