"""The one decode loop: plain decoding, every drafter and every policy run through it.

One cycle is one draft and one verify. Plain decoding is block size 1: no draft, and the target's
own token is all that a cycle commits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from blockpilot.base.errors import UserError
from blockpilot.decoding.protocols import Drafter, Policy
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.target import Target
from blockpilot.decoding.timing import Clock
from blockpilot.decoding.types import Draft, Trace, View
from blockpilot.decoding.verify import verify


@dataclass(frozen=True)
class Method:
    """A drafter and a policy that decode together."""

    drafter: Drafter
    policy: Policy

    def bind(self, target: Target) -> Self:
        """Itself, with everything loaded and checked for this target (UserError)."""
        self.drafter.bind(target)
        self.policy.bind(target, self.drafter)
        return self


def check_prompt(
    target: Target, prompt_ids: Sequence[int], max_new_tokens: int, widest: int
) -> str | None:
    """Why this prompt cannot be decoded with blocks of up to `widest` slots, or None."""
    if not prompt_ids:
        return "the prompt has no tokens"
    if not all(isinstance(token, int) for token in prompt_ids):
        return "one prompt at a time: its token ids are a flat list of integers"
    if foreign := [token for token in prompt_ids if not 0 <= token < target.embed_rows]:
        return f"token {foreign[0]} has no embedding; the target's are 0..{target.embed_rows - 1}"
    length = f"{len(prompt_ids)} prompt tokens and {max_new_tokens} new ones"
    end = len(prompt_ids) + max_new_tokens
    if end > target.max_positions:
        return f"{length} exceed the target's context of {target.max_positions}"
    # Blocks are never shortened near the budget, so the last one may reach past it.
    last = target.hard_end
    if last is not None and end + widest - 1 > last:
        return (
            f"{length} with blocks of {widest} can pass position {last}, where this target's "
            "positions end or begin to mean something else than its cache holds"
        )
    return None


@torch.inference_mode()
def decode(
    target: Target,
    method: Method,
    prompt_ids: Sequence[int],
    sampler: KeyedSampler | None = None,
    max_new_tokens: int = 128,
    *,
    emit: Callable[[list[int]], None] = lambda tokens: None,
    keep_prefill: bool = False,
) -> Trace:
    """Decode one prompt with a bound method; the tokens are the target's whatever the method.

    Without a sampler the target's best token is chosen everywhere.
    `emit` is called with the tokens of the prefill and of every cycle as they are committed.
    `keep_prefill` stores the prefill logits and last hidden state in the trace. Raises UserError
    for a prompt that cannot run and for logits that are not finite.
    """
    if problem := check_prompt(target, prompt_ids, max_new_tokens, method.policy.widest):
        raise UserError(problem)
    if max_new_tokens == 0:
        return Trace(stop_reason="budget")
    target.capture(method.drafter.feature_layers)
    run = _Run(
        target,
        method,
        sampler or KeyedSampler(),
        max_new_tokens,
        emit,
        Clock(target.device),
        Trace(),
    )
    view = run.prefill(prompt_ids, keep_prefill)
    run.clock.start()
    if not run.trace.stop_reason:
        method.policy.start(view)
        run.clock.mark("policy")
        if method.policy.speculates:
            method.drafter.start(view, run.cache.capacity)
        run.clock.mark("start")
    run.clock.lap()
    while not run.trace.stop_reason:
        view = run.cycle(view)
    run.trace.decode_s, parts = run.clock.finish()
    for part, seconds in parts.items():
        setattr(run.trace, f"{part}_s", seconds)
    run.trace.draft_s += run.trace.start_s
    if method.policy.reads_clock:
        run.trace.cycle_s = [run.clock.lap_s(cycle) for cycle in range(len(run.trace.committed))]
    return run.trace


@dataclass
class _Run:
    """State of one prompt's decode."""

    target: Target
    method: Method
    sampler: KeyedSampler
    budget: int
    emit: Callable[[list[int]], None]
    clock: Clock
    trace: Trace

    def prefill(self, prompt_ids: Sequence[int], keep: bool) -> View:
        """The prompt's forward and the first token, timed on its own."""
        self.clock.start()
        ids = torch.tensor(prompt_ids, device=self.target.device)
        end = len(prompt_ids)
        # Blocks are never shortened near the budget, so the last one may reach past it.
        self.cache = self.target.new_cache(end + self.budget + self.method.policy.widest)
        forward = self.target.forward(ids, self.cache, n_logits=1)
        if keep:
            self.trace.prefill_logits = forward.logits[-1].clone()
            self.trace.prefill_hidden = forward.hidden[-1].clone()
        anchor = self.choose(forward.logits, torch.tensor([end], device=ids.device))
        self.commit(anchor.tolist())
        self.clock.mark("prefill")
        self.trace.prefill_s, _ = self.clock.finish()
        return View(ids, anchor, end, forward.features, forward, self.sampler.temperature)

    def cycle(self, view: View) -> View:
        """One draft and one verify; the view after them."""
        drafter, policy = self.method.drafter, self.method.policy
        block = policy.block(view)
        self.clock.mark("policy")
        draft = Draft(view.anchor[:0])
        if block.drafted > 1:
            draft = drafter.draft(view, block.drafted)
            self.clock.mark("draft")
        n_drafted = draft.tokens.shape[0]
        if block.verified > 1:
            draft = policy.next(draft, view)
            self.clock.mark("policy")
        verdict = verify(self.target, self.cache, view, draft, self.choose)
        self.clock.mark("verify")
        self.trace.count(n_drafted, draft, verdict.path, self.commit(verdict.tokens))
        position = view.position + len(verdict.tokens)
        self.clock.mark("other")
        if policy.speculates:
            drafter.observe(verdict)
        self.clock.mark("draft")
        policy.observe(verdict)
        self.clock.mark("policy")
        self.clock.lap()
        timed = None
        if policy.reads_clock and len(self.trace.verified) > 1:
            # This cycle's verdict waited for the device, so the cycle before it is over.
            timed = self.trace.verified[-2], self.clock.lap_s(len(self.trace.verified) - 2)
        return replace(
            view,
            anchor=verdict.anchor,
            position=position,
            new_features=verdict.features,
            timed=timed,
        )

    def choose(self, logits: Tensor, positions: Tensor) -> Tensor:
        """The target's tokens, by the engine's own means."""
        return self.target.choose(self.sampler, logits, positions)

    def commit(self, tokens: list[int]) -> int:
        """Append tokens up to the first stop token and the budget; how many were committed."""
        room = self.budget - len(self.trace.tokens)
        kept = 0
        for token in tokens[:room]:
            if token < 0:
                raise UserError(
                    f"the target's logits are not finite at new token {len(self.trace.tokens) + 1};"
                    " try dtype=float32 or another attention kernel"
                )
            self.trace.tokens.append(token)
            kept += 1
            if token in self.target.stop_ids:
                self.trace.stop_reason = "stop"
                break
        if not self.trace.stop_reason and len(self.trace.tokens) == self.budget:
            self.trace.stop_reason = "budget"
        self.emit(self.trace.tokens[len(self.trace.tokens) - kept :])
        return kept
