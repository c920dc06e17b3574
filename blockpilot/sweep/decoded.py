"""A sweep that decodes every prompt with every method, timed and interleaved."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator
from typing import Any

from blockpilot.app.terminal import progress_bar
from blockpilot.base.errors import UserError
from blockpilot.decoding.divergence import Divergence, divergence
from blockpilot.decoding.loop import decode
from blockpilot.decoding.types import Trace
from blockpilot.prompts.base import Prompt
from blockpilot.records.schema import PLAIN, failed_row, ok_row, skipped_row
from blockpilot.records.store import Store
from blockpilot.sweep.methods import learners
from blockpilot.sweep.rows import Rows, Turn

log = logging.getLogger(__name__)

_WARM_UP_TOKENS = 8


class DecodedSweep(Rows):
    """Measures prompts with all methods and hands the rows to the store."""

    mode = "decode"

    def measure(self, prompts: list[Prompt], store: Store) -> None:
        """Decode prompts one after the other; the rows of a prompt are written together."""
        self._warm_up(prompts)
        learning = learners(self.methods)
        for name, drafter in learning.items():
            drafter.learn(self.run.learnt(name))
        with progress_bar() as progress:
            task = progress.add_task("decode", total=len(prompts))
            for prompt in prompts:
                before = {name: drafter.updates for name, drafter in learning.items()}
                store.append(self._rows(prompt))
                for name, drafter in learning.items():
                    if drafter.updates != before[name]:
                        self.run.keep_learnt(name, drafter.snapshot())
                progress.advance(task)

    def _warm_up(self, prompts: list[Prompt]) -> None:
        """Every method once, not stored: first calls pay for allocation and kernel choice.

        On the first prompt that can run; an error is told when the prompt's own turn comes.
        """
        for prompt in prompts:
            with contextlib.suppress(UserError, RuntimeError):
                turn = self.turn(prompt, [])
                if turn.problem is None:
                    sampler = self.sampler([turn.hash])
                    for method in self.methods.values():
                        decode(self.target, method, turn.ids, sampler, _WARM_UP_TOKENS)
                    return

    def _rows(self, prompt: Prompt) -> Iterator[dict[str, Any]]:
        """Rows of all turns and methods; earlier turns are answered by plain decoding."""
        answers: list[str] = []
        problem: str | None = None
        learning = learners(self.methods)
        for number in range(len(prompt.turns)):
            settings = {name: self.settings(prompt, number, name) for name in self.methods}
            try:
                if problem is None:
                    turn = self.turn(prompt, answers)
                    problem = turn.problem
                if problem is not None:
                    yield from (skipped_row(each, problem) for each in settings.values())
                    continue
                traces = self._decode_all(turn)
                parted = self._divergences(turn, traces)
            except (UserError, RuntimeError) as error:
                log.error("%s: %s", prompt.id, error)
                self.failed.append(prompt.id)
                problem = "an earlier turn failed"
                yield from (failed_row(each, error) for each in settings.values())
                continue
            plain = traces[PLAIN]
            if plain.prefill_logits is not None and plain.prefill_hidden is not None:
                self.keep_prefill(prompt, number, plain.prefill_logits, plain.prefill_hidden)
            for name, trace in traces.items():
                row = ok_row(settings[name], trace, prompt_ids=turn.ids)
                if where := parted.get(name):
                    row |= {"divergence_at": where.index, "divergence_margin": where.margin}
                if name in learning:
                    row["drafter_update"] = learning[name].updates
                yield row
            answers.append(self.text(plain.tokens))

    def _decode_all(self, turn: Turn) -> dict[str, Trace]:
        """One trace per method, in an order that differs from turn to turn."""
        names, budget = list(self.methods), self.cfg.decoding.max_new_tokens
        random.Random(turn.hash).shuffle(names)
        return {name: self._decoded(turn, name, budget) for name in names}

    def _decoded(self, turn: Turn, name: str, budget: int) -> Trace:
        """The trace of one method, without what an engine compiles at the first call of a shape."""
        while True:
            compiled = self.target.compile_s
            sampler, method = self.sampler([turn.hash]), self.methods[name]
            keep = name == PLAIN
            trace = decode(self.target, method, turn.ids, sampler, budget, keep_prefill=keep)
            if self.target.compile_s == compiled:
                return trace

    def _divergences(self, turn: Turn, traces: dict[str, Trace]) -> dict[str, Divergence]:
        """Methods whose output is not plain decoding's, with the margin of the first difference."""
        parted = {}
        plain, sampler = traces[PLAIN].tokens, self.sampler([turn.hash])
        for name, trace in traces.items():
            where = divergence(self.target, turn.ids, plain, trace.tokens, sampler)
            if where is not None:
                parted[name] = where
        return parted
