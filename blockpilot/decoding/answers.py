"""Answers of the target to many prompts at once, with all that a replay or a training reads.

Batched `generate` with the keyed sampler: an answer is what the decode loop would have produced, up
to the arithmetic of a wider forward.

Letters: R prompts, P padded prompt length, T generated length, F feature width, V vocabulary rows,
D width of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor

from blockpilot.base.errors import UserError
from blockpilot.decoding.cache import SlabCache
from blockpilot.decoding.features import FeatureTap
from blockpilot.decoding.sampling import KeyedLogitsProcessor, KeyedSampler
from blockpilot.decoding.target import Target


@dataclass(frozen=True)
class Answer:
    """One prompt's answer, its tensors in main memory.

    The last token of an answer has no features: it was never fed to the target.
    """

    tokens: list[int]  # new ones, the stop token included
    stop_reason: str  # "stop" or "budget"
    features: Tensor | None  # [len(prompt) + len(tokens) - 1, F]
    prefill_logits: Tensor  # [V], at the last prompt position
    hidden: Tensor  # [len(tokens), D], inputs of the LM head that chose the tokens

    @property
    def prefill_hidden(self) -> Tensor:
        """Input of the LM head at the last prompt position [D]."""
        return self.hidden[0]


class _Watch(LogitsProcessor):
    """Keeps the head's inputs of a generation and whether all logits were finite."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.hidden: list[Tensor] = []
        self.finite: Tensor = torch.tensor(True, device=target.device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        finite = scores.max(dim=-1).values.isfinite()
        self.finite = self.finite & finite
        self.hidden.append(self.target.head_input[:, -1].clone())
        return scores


@torch.inference_mode()
def answer(
    target: Target,
    prompts: Sequence[Sequence[int]],
    sampler: KeyedSampler,
    max_new_tokens: int,
    layer_ids: Sequence[int] = (),
) -> list[Answer]:
    """Answers to prompts of at least one token, budget >= 1; row i of the sampler is prompt i's.

    `layer_ids` are the target layers whose features are wanted. Raises UserError for logits that
    are not finite.
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    width = int(lengths.max())
    ids = torch.full((len(prompts), width), min(target.stop_ids, default=0))
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    watch, padding = _Watch(target), (width - lengths).to(target.device)
    target.capture(())  # the tap of the decode loop would collect every position
    with FeatureTap(target.layers, layer_ids) if layer_ids else nullcontext() as tap:
        output = generate(target, ids, mask, sampler, padding, max_new_tokens, [watch])
        captured = tap.take().cpu() if tap is not None else None  # [R, P + T - 1, F]
    # Not the logits that processors see: `generate` hands them over in float32.
    first = target.logits(watch.hidden[0]).cpu()
    hidden = torch.stack(watch.hidden, dim=1).cpu()  # [R, T, D]
    finite = watch.finite.tolist()
    answers = []
    for row, new in enumerate(output[:, width:].tolist()):
        if not finite[row]:
            raise UserError(
                "the target's logits are not finite; try dtype=float32 or another attention kernel"
            )
        tokens, start = cut(new, target.stop_ids), width - len(prompts[row])
        features = None if captured is None else captured[row, start : width + len(tokens) - 1]
        reason = "stop" if tokens[-1] in target.stop_ids else "budget"
        chose = hidden[row, : len(tokens)]
        answers.append(Answer(tokens, reason, features, first[row], chose))
    return answers


def generate(
    target: Target,
    ids: Tensor,  # [R, P] left-padded
    mask: Tensor,  # [R, P] 0 at pads
    sampler: KeyedSampler,
    padding: Tensor,  # [R]
    max_new_tokens: int,
    watches: Sequence[LogitsProcessor] = (),
) -> Tensor:
    """Prompts and what the target says to them, [R, P + T]; after its end a row repeats a pad."""
    stop = sorted(target.stop_ids)
    return target.model.generate(
        input_ids=ids.to(target.device),
        attention_mask=mask.to(target.device),
        # A fresh config: a checkpoint's own sampling defaults would act beside the sampler.
        generation_config=GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=stop or None,
            pad_token_id=stop[0] if stop else 0,
        ),
        logits_processor=[*watches, KeyedLogitsProcessor(sampler, padding)],
        # Not the target's own cache, which an engine may have tied to one sequence.
        cache=SlabCache(len(target.layers), ids.shape[1] + max_new_tokens),
    )


def cut(tokens: list[int], stop_ids: frozenset[int]) -> list[int]:
    """`tokens` up to the first stop token, itself included."""
    for index, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: index + 1]
    return tokens
