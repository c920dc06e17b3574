"""Stage `sweep`: every prompt at every block size, and plain decoding, one row each.

    python -m blockpilot.sweep +model=qwen3-4b prompts=[gsm8k,humaneval] radius=2
    python -m blockpilot.sweep mode=decode ...      # timed, every size decoded
    torchrun --nproc-per-node 2 -m blockpilot.sweep ...

Rows, prefill distributions and `records.parquet` lie in <paths.outputs>/sweep/<run id>/; the same
run id again finishes what is missing and repeats nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pandas as pd
from hydra.utils import instantiate
from omegaconf import OmegaConf
from rich.console import Console

from blockpilot.app.config import SweepConfig
from blockpilot.app.job import stage
from blockpilot.app.target import load_target
from blockpilot.app.terminal import show_estimate
from blockpilot.app.tracking import tracked
from blockpilot.base.errors import IncompleteError, UserError
from blockpilot.base.launch import meet, world
from blockpilot.base.provenance import facts
from blockpilot.costs.curve import cost_settings, load_cost
from blockpilot.decoding.divergence import EXACT_MARGIN
from blockpilot.decoding.loop import Method
from blockpilot.decoding.protocols import Drafter
from blockpilot.decoding.replay import can_replay
from blockpilot.decoding.target import Target
from blockpilot.prompts.base import Prompt
from blockpilot.prompts.load import load_prompts
from blockpilot.records.run_folder import RunFolder
from blockpilot.records.schema import token_hash
from blockpilot.records.store import Store, missing_prompts, shard
from blockpilot.sweep.decoded import DecodedSweep
from blockpilot.sweep.estimate import mode_of, sweep_estimate
from blockpilot.sweep.methods import sweep_methods
from blockpilot.sweep.replayed import ReplayedSweep
from blockpilot.sweep.rows import Rows
from blockpilot.sweep.settings import method_settings, shared_settings
from blockpilot.sweep.tables import figures_of, sweep_table, terminal_table

log = logging.getLogger("blockpilot.sweep")  # __name__ is __main__ under python -m


def run(cfg: SweepConfig) -> pd.DataFrame:
    """Replay or decode what is missing, print the table; all rows of the run folder.

    With `plan` nothing is loaded or measured, and there are no rows.

    Raises IncompleteError when prompts failed or, in float32 and float64, when an output differs
    from plain decoding by more than rounding explains. What was measured is kept.
    """
    prompts = load_prompts(
        instantiate(cfg.prompts.sets, _convert_="all"),
        limit=cfg.prompts.limit,
        path=cfg.prompts.path,
        split=cfg.prompts.split,
        folder=cfg.prompts.folder,
    )
    if cfg.plan:
        show_estimate(sweep_estimate(cfg, prompts))
        return pd.DataFrame()
    drafter: Drafter = instantiate(cfg.drafter, _convert_="all")
    target = load_target(cfg)
    drafter.bind(target)
    target.timed = cfg.mode == "decode" or not can_replay(drafter)
    methods = sweep_methods(cfg, drafter, target)
    run = RunFolder(Path(cfg.paths.outputs) / "sweep" / cfg.run_id)
    sweep = new_sweep(cfg, target, drafter, methods, run)
    rank, tracker = world(), instantiate(cfg.tracker, _convert_="all")
    provenance = facts(target.device) | {"target_parameters": target.model.num_parameters()}
    run.keep_settings(
        shared_settings(sweep, prompts[0], provenance), method_settings(sweep, prompts[0])
    )
    measured = Measured.of(run)
    measured.check_prompt_tokens(sweep, prompts)
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    with Store(
        run.path,
        run_id=cfg.run_id,
        rank=rank.rank,
        world_size=rank.size,
        settings=settings,
        provenance=provenance,
    ) as store:
        if rank.rank == 0:
            run.keep_prompts(prompts)
        expected = {prompt.id: sweep.expected_keys(prompt) for prompt in prompts}
        missing = set(missing_prompts(measured.rows, expected))
        todo = [each for each in shard(prompts, rank.rank, rank.size) if each.id in missing]
        if todo and (lacking := measured.methods - set(methods)):
            log.warning("prompts measured now have no %s, as rows of before", sorted(lacking))
        log.info("%d of %d prompts to do, methods: %s", len(todo), len(prompts), ", ".join(methods))
        sweep.measure(todo, store)
    run.derive_parquet()
    # A rank that leaves with an error ends the others, and the table is of all ranks' rows.
    meet(f"{cfg.run_id}/measured")
    records = run.records()
    if rank.rank == 0:
        with tracked(tracker, run.path, config=settings, rank=0):
            tracker.summarise(figures_of(show(records)))
    meet(f"{cfg.run_id}/shown")
    raise_if_incomplete(sweep, records)
    return records


@dataclass(frozen=True)
class Measured:
    """What earlier sessions of a run folder measured, read once."""

    rows: pd.DataFrame
    folder: Path

    @classmethod
    def of(cls, run: RunFolder) -> Self:
        """Reads the folder (UserError when it is damaged)."""
        names = ["prompt_id", "turn", "prompt_sha256", "method", "key", "status"]
        return cls(run.columns(names).to_pandas(), run.path)

    @property
    def methods(self) -> set[str]:
        """Names of the methods that have rows."""
        return set(self.rows["method"])

    def check_prompt_tokens(
        self, sweep: DecodedSweep | ReplayedSweep, prompts: Sequence[Prompt]
    ) -> None:
        """Refuse a folder whose rows were measured on other tokens of a prompt (UserError)."""
        first = self.rows[(self.rows["turn"] == 0) & self.rows["prompt_sha256"].notna()]
        stored = dict(zip(first["prompt_id"], first["prompt_sha256"], strict=True))
        for prompt in prompts:
            if prompt.id not in stored:
                continue
            if token_hash(sweep.turn(prompt, []).ids) != stored[prompt.id]:
                raise UserError(
                    f"rows in {self.folder} were measured on other tokens of prompt {prompt.id}: "
                    "its text, the tokenizer or its chat template changed; choose another run_id"
                )


def shareable(cfg: SweepConfig) -> bool:
    """Whether a pipeline may give it several processes: beside each other they spoil times."""
    return mode_of(cfg) == "replay"


def new_sweep(
    cfg: SweepConfig,
    target: Target,
    drafter: Drafter,
    methods: dict[str, Method],
    run: RunFolder,
) -> DecodedSweep | ReplayedSweep:
    """The sweep of the mode asked for; a drafter that cannot be replayed is decoded, told so."""
    if not target.timed:
        cost = None
        if cfg.cost is not None:
            own = {"temperature": cfg.decoding.temperature}
            cost = load_cost(cfg.cost, cost_settings(target, drafter) | own)
            names = ("hardware", "threads", "dtype")
            log.info("times are predicted for %s, threads %s, %s", *map(cost.settings.get, names))
        return ReplayedSweep(cfg, target, methods, run, drafter, cost)
    if cfg.cost is not None:
        raise UserError(f"cost={cfg.cost}: times of decoded rows are measured; set mode=replay")
    if cfg.mode == "replay":
        log.warning("drafter %s cannot be replayed: decoding instead", drafter.name)
    return DecodedSweep(cfg, target, methods, run)


def show(records: pd.DataFrame) -> pd.DataFrame:
    """Print the table of a sweep; the table."""
    table = sweep_table(records)
    Console().print(terminal_table(table, "sweep"))
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
    return table


def raise_if_incomplete(sweep: Rows, records: pd.DataFrame) -> None:
    """IncompleteError when prompts failed now or outputs differ beyond rounding, now or before."""
    if sweep.failed:
        raise IncompleteError(
            f"failed prompts: {len(sweep.failed)} ({', '.join(sweep.failed[:5])}); their rows "
            f"hold the error, the same run_id tries them again"
        )
    exact = records[records["dtype"].isin(["float32", "float64"])]
    unequal = exact[exact["divergence_margin"] > EXACT_MARGIN]
    if len(unequal):
        outputs = [
            f"{row['prompt_id']} with {row['method']} ({row['divergence_margin']:.2g})"
            for row in unequal.head(5).to_dict("records")
        ]
        raise IncompleteError(
            f"outputs differ from plain decoding by more than rounding explains "
            f"(margin over {EXACT_MARGIN}): {', '.join(outputs)}"
        )


@stage("sweep", SweepConfig)
def main(cfg: SweepConfig) -> None:
    """Entry point."""
    run(cfg)


if __name__ == "__main__":
    main()
