"""A sweep that answers each prompt once, many at a time, and replays all sizes from the answer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from blockpilot.app.config import SweepConfig
from blockpilot.app.terminal import progress_bar
from blockpilot.base.errors import UserError
from blockpilot.costs.curve import CostCurve
from blockpilot.decoding.anchors import TOP, KnownAnswer, Replay
from blockpilot.decoding.answers import Answer, answer
from blockpilot.decoding.loop import Method
from blockpilot.decoding.protocols import Drafter, Policy, ReplayablePolicy
from blockpilot.decoding.replay import anchors_per_chunk, decided, free_memory, replay
from blockpilot.decoding.target import Target
from blockpilot.decoding.types import Trace
from blockpilot.prompts.base import Prompt
from blockpilot.records.replays import Text
from blockpilot.records.run_folder import RunFolder
from blockpilot.records.schema import PLAIN, failed_row, ok_row, skipped_row
from blockpilot.records.store import Store
from blockpilot.sweep.rows import Rows, Turn

log = logging.getLogger(__name__)

_SHARE = 8  # of the free memory, the part that drafts may take


@dataclass
class _Conversation:
    """How far one prompt has come."""

    prompt: Prompt
    answers: list[str] = field(default_factory=list)
    problem: str | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)


def replayable(method: str, policy: Policy) -> ReplayablePolicy:
    """The policy of a method, which a replay can ask (UserError where it cannot)."""
    if policy.reads_clock:
        raise UserError(
            f"method {method}: its choices depend on this machine's clock; set mode=decode"
        )
    if not isinstance(policy, ReplayablePolicy):
        raise UserError(f"method {method}: policy {policy.name} has no replay; set mode=decode")
    return policy


class ReplayedSweep(Rows):
    """Replays prompts with all methods and hands the rows to the store."""

    mode = "replay"

    def __init__(
        self,
        cfg: SweepConfig,
        target: Target,
        methods: dict[str, Method],
        run: RunFolder,
        drafter: Drafter,
        cost: CostCurve | None,
    ) -> None:
        super().__init__(cfg, target, methods, run)
        self.drafter, self.cost = drafter, cost
        given = cfg.replay.memory_gb
        self.memory = int(given * 2**30) if given else free_memory(target.device) // _SHARE
        self.policies = {name: replayable(name, each.policy) for name, each in methods.items()}
        self.blocks = [b for each in self.policies.values() for b in each.replay_blocks()]
        self.candidates = 0
        if drafter.has_marginals and cfg.replay.marginals:
            self.candidates = max([TOP, *(each.candidates for each in self.policies.values())])
        for name, method in methods.items():
            if self.policies[name].candidates and not cfg.replay.marginals:
                raise UserError(f"replay.marginals=false: {name} is replayed from the marginals")
            if cost is not None:  # a size without a cost shows here, not prompt by prompt
                seconds = cost.tree_seconds if method.policy.tree else cost.seconds
                seconds(method.policy.block_size or 1, 1)
                cost.copy_seconds(1 + getattr(method.policy, "longest_copy", 0), 1)

    def measure(self, prompts: list[Prompt], store: Store) -> None:
        """Answer and replay batches of prompts; the rows of a prompt are written together."""
        # Prompts of similar length share a batch, so that little of it is padding.
        ordered = sorted(prompts, key=lambda prompt: len(prompt.turns[0]))
        size = self.cfg.replay.batch_size
        with progress_bar() as progress:
            task = progress.add_task("replay", total=len(prompts))
            for start in range(0, len(ordered), size):
                batch = [_Conversation(prompt) for prompt in ordered[start : start + size]]
                for number in range(max(len(each.prompt.turns) for each in batch)):
                    self._turn_of_all(batch, number)
                for each in batch:
                    store.append(each.rows)
                    progress.advance(task)

    def _turn_of_all(self, batch: Sequence[_Conversation], number: int) -> None:
        """Rows of turn `number` of every conversation that has one."""
        ready: list[tuple[_Conversation, Turn]] = []
        for each in batch:
            if number >= len(each.prompt.turns):
                continue
            if each.problem is None:
                try:
                    turn = self.turn(each.prompt, each.answers)
                    each.problem = turn.problem
                except UserError as error:
                    self._fail(each, number, error)
                    continue
            if each.problem is None:
                ready.append((each, turn))
            else:
                each.rows += [
                    skipped_row(self.settings(each.prompt, number, name), each.problem)
                    for name in self.methods
                ]
        for each, turn, answered in self._answered(ready, number):
            try:
                each.rows += self._replayed(each.prompt, number, turn, answered)
                each.answers.append(self.text(answered.tokens if answered else []))
            except (UserError, RuntimeError) as error:
                self._fail(each, number, error)

    def _fail(self, each: _Conversation, number: int, error: Exception) -> None:
        log.error("%s: %s", each.prompt.id, error)
        self.failed.append(each.prompt.id)
        each.problem = "an earlier turn failed"
        settings = [self.settings(each.prompt, number, name) for name in self.methods]
        each.rows += [failed_row(one, error) for one in settings]

    def _answered(
        self, ready: list[tuple[_Conversation, Turn]], number: int
    ) -> list[tuple[_Conversation, Turn, Answer | None]]:
        """The turns with their answers; one that fails does not take the others with it."""
        budget, layers = self.cfg.decoding.max_new_tokens, self.drafter.feature_layers
        if not ready or budget == 0:
            return [(each, turn, None) for each, turn in ready]
        sampler = self.sampler([turn.hash for _, turn in ready])
        try:
            answers = answer(self.target, [t.ids for _, t in ready], sampler, budget, layers)
        except (UserError, RuntimeError) as error:
            if len(ready) > 1:
                return [one for pair in ready for one in self._answered([pair], number)]
            self._fail(ready[0][0], number, error)
            return []
        return [(each, turn, one) for (each, turn), one in zip(ready, answers, strict=True)]

    def _replayed(
        self, prompt: Prompt, number: int, turn: Turn, answered: Answer | None
    ) -> list[dict[str, Any]]:
        """One row per method; the per-anchor record and the prefill are stored beside them."""
        if answered is None:
            traces = {name: Trace(stop_reason="budget") for name in self.methods}
        else:
            self.keep_prefill(prompt, number, answered.prefill_logits, answered.prefill_hidden)
            replayed = self._replay(turn, answered)
            text = Text([*turn.ids, *answered.tokens], len(turn.ids))
            features = answered.features if self.cfg.replay.keep_features else None
            settings = self.settings(prompt, number, PLAIN)
            self.run.keep_replay(settings, text, replayed, features)
            known = KnownAnswer(
                turn.ids,
                answered.tokens,
                answered.stop_reason,
                self.cfg.decoding.temperature,
                answered.prefill_logits.to(self.target.device),
                answered.prefill_hidden.to(self.target.device),
            )
            traces = {
                name: decided(method.policy, replayed, known)
                for name, method in self.methods.items()
            }
        rows = []
        for name, trace in traces.items():
            row = ok_row(self.settings(prompt, number, name), trace, prompt_ids=turn.ids)
            if self.cost is not None:
                trees = self.methods[name].policy.tree
                row |= self.cost.predicted(trace, len(turn.ids), trees=trees)
            rows.append(row)
        return rows

    def _replay(self, turn: Turn, answered: Answer) -> Replay:
        device = self.target.device
        ids = torch.tensor([*turn.ids, *answered.tokens], device=device)
        features = None if answered.features is None else answered.features.to(device)
        return replay(
            self.drafter,
            ids,
            len(turn.ids),
            features,
            self.blocks,
            chunk=anchors_per_chunk(self.drafter, self.target, len(ids), self.memory),
            candidates=self.candidates,
        )
