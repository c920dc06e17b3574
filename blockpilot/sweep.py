"""Stage `sweep`: every prompt at every block size, and plain decoding, one row each.

    python -m blockpilot.sweep +model=qwen3-4b prompts=[gsm8k,humaneval] radius=2
    torchrun --nproc-per-node 2 -m blockpilot.sweep ...

Rows, prefill distributions and `records.parquet` lie in <paths.outputs>/sweep/<run id>/; the same
run id again finishes what is missing and repeats nothing.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import pandas as pd
from hydra.utils import instantiate
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from blockpilot.config import SweepConfig
from blockpilot.decoding.divergence import EXACT_MARGIN, Divergence, divergence
from blockpilot.decoding.loop import Method, check_prompt, decode
from blockpilot.decoding.protocols import Drafter
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.target import Target, load_target
from blockpilot.decoding.types import Trace
from blockpilot.drafters.none import NoDrafter
from blockpilot.errors import UserError
from blockpilot.paths import conf_dir
from blockpilot.policies.fixed import FixedPolicy
from blockpilot.prompts.base import Prompt
from blockpilot.prompts.load import load_prompts
from blockpilot.prompts.render import render
from blockpilot.provenance import facts
from blockpilot.records.prefill import Prefill, save_prefill
from blockpilot.records.schema import PLAIN, Settings, failed_row, ok_row, row_key, skipped_row
from blockpilot.records.store import Store, missing_prompts, read_records, shard, write_parquet
from blockpilot.reporting.tables import render as render_table
from blockpilot.reporting.tables import sweep_table
from blockpilot.runtime import IncompleteError, console, meet, stage, world
from blockpilot.tracking import Tracker, tracked
from blockpilot.verify.chain import verify_chain

log = logging.getLogger("blockpilot.sweep")  # __name__ is __main__ under python -m

_WARM_UP_TOKENS = 8


def run(cfg: SweepConfig) -> pd.DataFrame:
    """Decode what is missing, print the table; all rows of the run folder.

    Raises IncompleteError when prompts failed or, in float32 and float64, when an output differs
    from plain decoding by more than rounding explains. What was measured is kept.
    """
    folder = Path(cfg.paths.outputs) / "sweep" / cfg.run_id
    prompts = load_prompts(
        instantiate(cfg.prompts.sets, _convert_="all"),
        limit=cfg.prompts.limit,
        path=cfg.prompts.path,
        split=cfg.prompts.split,
    )
    drafter: Drafter = instantiate(cfg.drafter, _convert_="all")
    target = load_target(cfg)
    drafter.bind(target)
    methods = sweep_methods(cfg, drafter, target)
    sweep = Sweep(cfg, target, methods, folder)
    place, tracker = world(), instantiate(cfg.tracker, _convert_="all")
    expected = {prompt.id: sweep.expected_keys(prompt) for prompt in prompts}
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    with (
        tracked(tracker, run_id=cfg.run_id, folder=folder, config=settings, rank=place.rank),
        Store(
            folder,
            run_id=cfg.run_id,
            rank=place.rank,
            world_size=place.size,
            settings=settings,
            provenance=facts(target.device),
        ) as store,
    ):
        missing = set(missing_prompts(folder, expected))
        todo = [p for p in shard(prompts, place.rank, place.size) if p.id in missing]
        log.info("%d of %d prompts to do, methods: %s", len(todo), len(prompts), ", ".join(methods))
        sweep.measure(todo, store, tracker)
    write_parquet(folder)
    # A rank that leaves with an error ends the others, and the table is of all ranks' rows.
    meet(f"{cfg.run_id}/measured")
    records = read_records(folder)
    if place.rank == 0:
        show(records)
    meet(f"{cfg.run_id}/shown")
    sweep.raise_if_incomplete()
    return records


def sweep_methods(cfg: SweepConfig, drafter: Drafter, target: Target) -> dict[str, Method]:
    """Plain decoding and the drafter at every size, by name; bound to the target.

    Sizes are B-k..B+k around the trained block size B, clipped to what is possible, and those
    listed. Size 1 is plain decoding.
    """
    plain = Method(NoDrafter(), FixedPolicy(block_size=1, block_mode=cfg.block_mode), verify_chain)
    methods = {PLAIN: plain}
    trained = drafter.trained_block_size
    sizes = set(cfg.sizes)
    if trained is not None:
        widest = trained if cfg.block_mode == "verify" else trained + cfg.radius
        sizes |= set(range(max(1, trained - cfg.radius), widest + 1))
    elif sizes - {1}:
        raise UserError(f"sizes={list(cfg.sizes)}: drafter {drafter.name} has no block size but 1")
    for size in sorted(sizes - {1}):
        policy = FixedPolicy(block_size=size, block_mode=cfg.block_mode)
        methods[f"{drafter.name}{size}"] = Method(drafter, policy, verify_chain)
    for method in methods.values():
        method.bind(target)
    return methods


def show(records: pd.DataFrame) -> None:
    """Print the table of a sweep."""
    Console().print(render_table(sweep_table(records), "sweep"))
    parted = records[records["divergence_margin"].notna()]
    if not parted.empty:
        margins = parted["divergence_margin"]
        widest: dict[str, Any] = parted.to_dict("records")[int(margins.to_numpy().argmax())]  # type: ignore[assignment]
        log.info(
            "%d outputs part from plain decoding, by a median margin of %.2g; the widest, %.2g, is "
            "%s with %s at new token %d (columns divergence_at, divergence_margin)",
            len(parted),
            margins.median(),
            margins.max(),
            widest["prompt_id"],
            widest["method"],
            widest["divergence_at"],
        )


@dataclass(frozen=True)
class _Turn:
    """One decode's input."""

    ids: list[int]
    sampler: KeyedSampler
    problem: str | None


class Sweep:
    """Measures prompts with all methods and hands the rows to the store."""

    def __init__(
        self, cfg: SweepConfig, target: Target, methods: dict[str, Method], folder: Path
    ) -> None:
        self.cfg, self.target, self.methods, self.folder = cfg, target, methods, folder
        self.failed: list[str] = []
        self.unequal: list[str] = []

    def expected_keys(self, prompt: Prompt) -> set[str]:
        """Keys of the rows that a finished prompt has."""
        return {
            row_key(self.settings(prompt, turn, name))
            for turn in range(len(prompt.turns))
            for name in self.methods
        }

    def settings(self, prompt: Prompt, turn: int, name: str) -> Settings:
        """What defines the row of a prompt, turn and method."""
        cfg, drafter, policy = self.cfg, self.methods[name].drafter, self.methods[name].policy
        assert isinstance(policy, FixedPolicy)
        assert policy.block_size is not None
        return Settings(
            prompt_id=prompt.id,
            prompt_hash=prompt.hash,
            prompt_set=prompt.set,
            split=prompt.split,
            turn=turn,
            repeat=0,
            method=name,
            drafter=drafter.name,
            drafter_checkpoint=drafter.fingerprint,
            policy=policy.name,
            trained_block_size=drafter.trained_block_size,
            block_size=policy.block_size,
            block_mode=policy.block_mode,
            target=cfg.model.name,
            target_revision=cfg.model.revision,
            weights=cfg.weights,
            temperature=cfg.decoding.temperature,
            top_k=cfg.decoding.top_k,
            top_p=cfg.decoding.top_p,
            seed=cfg.seed,
            dtype=str(self.target.dtype).removeprefix("torch."),
            attention=cfg.attention,
            engine="eager",
            device=self.target.device.type,
            thinking=cfg.model.thinking,
            max_new_tokens=cfg.decoding.max_new_tokens,
            mode="decode",
        )

    def measure(self, prompts: list[Prompt], store: Store, tracker: Tracker) -> None:
        """Decode prompts one after the other; the rows of a prompt are written together."""
        self._warm_up(prompts)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        with Progress(*columns, console=console(), disable=world().rank != 0) as progress:
            task = progress.add_task("sweep", total=len(prompts))
            for step, prompt in enumerate(prompts, start=1):
                rows = list(self._rows(prompt))
                store.append(rows)
                progress.advance(task)
                tracker.log(_told(rows), step=step)

    def raise_if_incomplete(self) -> None:
        """IncompleteError when prompts failed or outputs differ beyond rounding."""
        if self.failed:
            raise IncompleteError(
                f"failed prompts: {len(self.failed)} ({', '.join(self.failed[:5])}); their rows "
                f"hold the error, the same run_id tries them again"
            )
        if self.unequal:
            raise IncompleteError(
                f"outputs differ from plain decoding by more than rounding explains "
                f"(margin over {EXACT_MARGIN}): {', '.join(self.unequal[:5])}"
            )

    def _warm_up(self, prompts: list[Prompt]) -> None:
        """Every method once, not stored: first calls pay for allocation and kernel choice.

        On the first prompt that can run; an error is told when the prompt's own turn comes.
        """
        for prompt in prompts:
            with contextlib.suppress(UserError, RuntimeError):
                turn = self._turn(prompt, [])
                if turn.problem is None:
                    for method in self.methods.values():
                        decode(self.target, method, turn.ids, turn.sampler, _WARM_UP_TOKENS)
                    return

    def _turn(self, prompt: Prompt, answers: list[str]) -> _Turn:
        """The conversation up to the next user message, rendered."""
        system = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
        messages = [*system, {"role": "user", "content": prompt.turns[0]}]
        for answer, question in zip(answers, prompt.turns[1:], strict=False):
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": question})
        ids = render(self.target.tokenizer, messages, self.cfg.model.thinking)
        decoding, turn = self.cfg.decoding, len(answers)
        sampler = KeyedSampler(
            temperature=decoding.temperature,
            top_k=decoding.top_k,
            top_p=decoding.top_p,
            seed=self.cfg.seed,
            prompt_hashes=[f"{prompt.hash}/{turn}" if turn else prompt.hash],
        )
        return _Turn(ids, sampler, check_prompt(self.target, ids, decoding.max_new_tokens))

    def _rows(self, prompt: Prompt) -> Iterator[dict[str, Any]]:
        """Rows of all turns and methods; earlier turns are answered by plain decoding."""
        answers: list[str] = []
        problem: str | None = None
        for number in range(len(prompt.turns)):
            settings = {name: self.settings(prompt, number, name) for name in self.methods}
            try:
                if problem is None:
                    turn = self._turn(prompt, answers)
                    problem = turn.problem
                if problem is not None:
                    yield from (skipped_row(each, problem) for each in settings.values())
                    continue
                traces = self._decode_all(prompt, number, turn)
                parted = self._divergences(prompt, turn, traces)
            except (UserError, RuntimeError) as error:
                log.error("%s: %s", prompt.id, error)
                self.failed.append(prompt.id)
                problem = "an earlier turn failed"
                yield from (failed_row(each, error) for each in settings.values())
                continue
            self._keep_prefill(settings[PLAIN], traces[PLAIN])
            for name, trace in traces.items():
                row = ok_row(settings[name], trace, n_prompt_tokens=len(turn.ids))
                if where := parted.get(name):
                    row |= {"divergence_at": where.index, "divergence_margin": where.margin}
                yield row
            answers.append(
                self.target.tokenizer.decode(traces[PLAIN].tokens, skip_special_tokens=True)
            )

    def _decode_all(self, prompt: Prompt, number: int, turn: _Turn) -> dict[str, Trace]:
        """One trace per method, in an order that differs from prompt to prompt."""
        names = list(self.methods)
        random.Random(f"{prompt.hash}/{number}").shuffle(names)
        traces = {}
        for name in names:
            traces[name] = decode(
                self.target,
                self.methods[name],
                turn.ids,
                turn.sampler,
                self.cfg.decoding.max_new_tokens,
                keep_prefill=name == PLAIN,
            )
        return traces

    def _keep_prefill(self, settings: Settings, trace: Trace) -> None:
        if trace.prefill_logits is not None and trace.prefill_hidden is not None:
            prefill = Prefill(trace.prefill_logits, trace.prefill_hidden)
            save_prefill(self.folder, settings, prefill)

    def _divergences(
        self, prompt: Prompt, turn: _Turn, traces: dict[str, Trace]
    ) -> dict[str, Divergence]:
        """Methods whose output is not plain decoding's, with the margin of the first difference."""
        parted = {}
        plain = traces[PLAIN].tokens
        exact = self.settings(prompt, 0, PLAIN).dtype in ("float32", "float64")
        for name, trace in traces.items():
            where = divergence(self.target, turn.ids, plain, trace.tokens, turn.sampler)
            if where is not None:
                parted[name] = where
                if exact and where.margin > EXACT_MARGIN:
                    self.unequal.append(f"{prompt.id} with {name} ({where.margin:.2g})")
        return parted


def _told(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Tau of each method on one prompt, for the tracker."""
    taus: dict[str, list[float]] = {}
    for row in rows:
        if row["committed"]:
            tau = sum(row["committed"]) / len(row["committed"])
            taus.setdefault(f"tau/{row['method']}", []).append(tau)
    return {name: sum(values) / len(values) for name, values in taus.items()}


@stage(
    hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="sweep"), SweepConfig
)
def main(cfg: SweepConfig) -> None:
    """Entry point."""
    run(cfg)


if __name__ == "__main__":
    main()
