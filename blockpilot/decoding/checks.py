"""What the decode loop takes for granted of a target, tried on it before a prompt is read.

A model that keeps recurrent state, ignores the cache it is given or computes its logits in a way of
its own would decode nonsense or end in a traceback; it is refused in one line instead.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from blockpilot.base.errors import UserError
from blockpilot.base.json_values import first_line
from blockpilot.decoding.target import Target
from blockpilot.decoding.types import Branches

_LENGTH = 8  # positions of the trial
_KEPT = 3  # of them before the rollback
_KINDS = {"full_attention", "sliding_attention"}
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_TOLERANCE_16_BIT = 0.04
"""Allowed distance of two ways to the same logits, as a share of their size. Rounding to bfloat16
moves those of tiny models of 34 families by 0.02 at most and of SmolLM2-135M by 0.01; there one
position forgotten by the cache moves them by 0.07, one that is not rolled back by 0.17."""


@torch.inference_mode()
def check_target(target: Target) -> None:
    """Refuse a target that the loop would decode wrongly (UserError, in one line)."""
    kind = target.config.model_type
    if target.model._is_stateful:
        raise UserError(f"{kind}: it keeps recurrent state, which no rollback undoes")
    kinds = set(getattr(target.config, "layer_types", None) or ())
    if other := sorted(kinds - _KINDS):
        raise UserError(f"{kind}: layers of {other[0]}; known are {' and '.join(sorted(_KINDS))}")
    try:
        problem = _tried(target)
    except Exception as error:  # whatever a foreign model raises when it is not what we assume
        raise UserError(
            f"{kind}: the decode loop cannot run it ({type(error).__name__}: {first_line(error)})"
        ) from error
    finally:
        target.capture(())
    if problem:
        raise UserError(f"{kind}: {problem}")


def _tried(target: Target) -> str | None:
    """What is wrong with the target, found by short forwards on tokens that mean nothing."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(target.embed_rows, (_LENGTH,), generator=generator)
    ids = drawn.to(target.device)
    n = len(ids) - _KEPT
    target.capture(range(len(target.layers)))
    cache = target.new_cache(2 * _LENGTH)
    whole = target.forward(ids, cache, n_logits=n)
    wanted, hidden = whole.logits.clone(), whole.hidden.clone()
    if not wanted.isfinite().all():
        return None  # told with the first prompt, where more is known
    width = len(target.layers) * target.config.hidden_size
    if cache.length != _LENGTH or whole.features is None or whole.features.shape[-1] != width:
        return "its layers do not hand over one hidden state a position, or its cache is its own"

    def uncached() -> Tensor:
        return target.model(input_ids=ids[None], use_cache=False).logits[0, _KEPT:]

    def rolled_back() -> Tensor:
        cache.rollback(_KEPT)
        target.forward(ids[_KEPT:].flip(0), cache, n_logits=1)
        cache.rollback(_KEPT)
        return target.forward(ids[_KEPT:], cache, n_logits=n).logits

    def one_by_one() -> Tensor:
        cache.rollback(_KEPT)
        rows = [target.forward(each[None], cache, n_logits=1).logits for each in ids[_KEPT:]]
        return torch.cat([row.clone() for row in rows])

    def as_a_tree() -> Tensor:
        """The same chain, told as a tree, beside a second branch of one token."""
        cache.rollback(_KEPT)
        branches = Branches([*range(n - 1), 0], ids.device)
        tree = torch.cat([ids[_KEPT:], ids[:1]])
        return target.forward(tree, cache, n_logits=n + 1, branches=branches).logits[:-1]

    ways: dict[str, Callable[[], Tensor]] = {
        "its logits are not its LM head's output, scaled and capped": lambda: target.logits(hidden),
        "decoding with a cache differs from decoding without one": uncached,
        "its cache does not forget what is rolled back": rolled_back,
        "a token at a time gives other logits than all at once": one_by_one,
        "it does not follow the positions and masks of a tree": as_a_tree,
    }
    for problem, way in ways.items():
        if _distance(way(), wanted) > _TOLERANCE.get(target.dtype, _TOLERANCE_16_BIT):
            return problem
    return None


def _distance(found: Tensor, wanted: Tensor) -> float:
    """Median over positions of the difference's norm over the norm of what is wanted."""
    difference = (found.double() - wanted.double()).norm(dim=-1)
    return float((difference / wanted.double().norm(dim=-1).clamp_min(1e-30)).median())
