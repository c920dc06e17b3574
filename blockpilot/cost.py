"""Stage `cost`: what a cycle costs on this machine, per block size and context length.

    python -m blockpilot.cost +model=qwen3-4b weights=random drafter.checkpoint=random
    python -m blockpilot.cost policy.path=outputs/train/<run id>/predictor    # and its predictor
    python -m blockpilot.sweep cost=outputs/cost/<run id>/cost.json

    python -m blockpilot.cost batch=[1,4,16]    # and forwards over so many sequences at once

A dense model's cost depends on shapes only, so random weights give the real curve.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from blockpilot.app.config import CostConfig
from blockpilot.app.job import stage
from blockpilot.app.target import load_target
from blockpilot.app.terminal import show_estimate
from blockpilot.app.tracking import tracked
from blockpilot.base.errors import UserError
from blockpilot.base.files import replace_file
from blockpilot.base.provenance import facts
from blockpilot.costs.batch import BatchPoint
from blockpilot.costs.curve import CostCurve, cost_settings, load_cost
from blockpilot.costs.forwards import BatchGrid, batch_points
from blockpilot.costs.measure import Cell, measured, silent_drafters
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.protocols import Batchable, Drafter
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.target import Target
from blockpilot.policies.blockpilot import BlockSizePolicy
from blockpilot.policies.cells import cell_methods
from blockpilot.records.run_folder import RunFolder
from blockpilot.records.settings import keep_settings

log = logging.getLogger("blockpilot.cost")  # __name__ is __main__ under python -m

_PREFIX = {"chain": "b", "tree": "tree", "copy": "copy"}
_ASIDE = ("paths", "threads", "tracker")  # settings that the curve's own identity leaves out


def run(cfg: CostConfig) -> CostCurve:
    """Measure the curve, print it and write cost.json into the run's folder.

    A curve that is there is not measured again: what was decided by it would be another's.
    """
    contexts = sorted(set(cfg.contexts))
    n_cells = sum(map(len, map(set, (cfg.sizes, cfg.trees, cfg.copies)))) * len(contexts)
    n_decodes = n_cells * (cfg.repeats + 1)
    if cfg.plan:
        # Without its weights the size of the drafter's block, behind trees, is not known.
        forwards = batch_grid(cfg, None).n_forwards
        show_estimate(
            {
                "decodes": n_decodes,
                "target forwards, at most": n_decodes * cfg.decoding.max_new_tokens,
                "longest context": max(contexts) + cfg.decoding.max_new_tokens,
            }
            | ({"forwards of batches, about": forwards} if cfg.batch else {})
        )
        return CostCurve({}, {}, [])
    if cfg.decoding.max_new_tokens < 2:
        raise UserError("decoding.max_new_tokens: a cycle needs a token after the first, give >= 2")
    tracker = instantiate(cfg.tracker, _convert_="all")
    target = load_target(cfg)
    target.stop_ids = frozenset()  # the text is noise; nothing may end it early
    drafter: Drafter = instantiate(cfg.drafter, _convert_="all")
    methods = cost_methods(cfg, drafter, target)
    grid = batch_grid(cfg, drafter.trained_block_size)
    if cfg.batch and grid.drafted and not isinstance(drafter, Batchable):
        raise UserError(
            f"batch={list(cfg.batch)}: drafter {drafter.name} drafts for one sequence at a time; "
            "give batch=[], or sizes=[1] trees=[]"
        )
    temperature = cfg.decoding.temperature  # above 0 a cycle also draws noise
    settings = cost_settings(target, drafter) | {"temperature": temperature}
    file = RunFolder(Path(cfg.paths.outputs) / "cost" / cfg.run_id).cost_curve
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    asked = {name: value for name, value in config.items() if name not in _ASIDE}
    if not cfg.batch:  # as in folders from before there was the key
        del asked["batch"]
    weights = {"target_fingerprint": target.fingerprint, "drafter_checkpoint": drafter.fingerprint}
    keep_settings(file.with_name("asked.json"), settings | weights | asked, what="a cost curve")
    if file.exists():
        curve = load_cost(file, settings)
        tell(curve)
        log.info("measured before: %s", file)
        return curve
    with silent_drafters():
        points = measured(
            target,
            methods,
            contexts,
            repeats=cfg.repeats,
            budget=cfg.decoding.max_new_tokens,
            sampler=KeyedSampler(
                temperature=temperature,
                top_k=cfg.decoding.top_k,
                top_p=cfg.decoding.top_p,
                seed=cfg.seed,
            ),
            seed=cfg.seed,
        )
        predicting = predictor_seconds(cfg, target, drafter)
        batched = batch_seconds(cfg, target, drafter, grid) if cfg.batch else []
    curve = CostCurve(settings, facts(target.device), points, predicting, batched)
    text = curve.to_json().encode()
    replace_file(file, lambda stream: stream.write(text))
    tell(curve)
    with tracked(tracker, file.parent, config=config, rank=0):
        tracker.summarise(figures_of(curve))
    log.info("curve in %s", file)
    return curve


def figures_of(curve: CostCurve) -> dict[str, float]:
    """What its table shows, by name: milliseconds of a cycle and of a prediction."""
    figures = {
        f"cycle_ms/{_PREFIX[each.kind]}{each.block_size}/context{each.context}": 1e3 * each.cycle_s
        for each in curve.points
    }
    if curve.predictor_s is not None:
        figures["predictor_ms"] = 1e3 * curve.predictor_s[1]
    return figures | {
        f"batch{each.batch}_ms/{each.part}{each.positions}/context{each.context}": 1e3
        * each.seconds
        for each in curve.batched
    }


def tell(curve: CostCurve) -> None:
    """Print the curve, and how far its medians can be told apart."""
    Console().print(cost_table(curve))
    if curve.batched:
        Console().print(batch_table(curve.batched))
    share = 100 * curve.uncertainty()
    log.info("the least certain median has a standard error of about %.1f%%", share)


def cost_methods(cfg: CostConfig, drafter: Drafter, target: Target) -> dict[Cell, Method]:
    """One bound method per chain, tree and copy."""
    by_kind = {"chain": cfg.sizes, "tree": cfg.trees, "copy": cfg.copies}
    cells = [Cell(size, kind) for kind, sizes in by_kind.items() for size in sorted(set(sizes))]
    methods = cell_methods(cells, drafter, target)
    # Without drafts a block of any size is one position: the curve would say what was not measured.
    if drafter.trained_block_size is None and set(cfg.sizes) - {1}:
        raise UserError(
            f"sizes={list(cfg.sizes)}: drafter {drafter.name} has no block size but 1; give "
            "sizes=[1], or a drafter"
        )
    return methods


def predictor_seconds(cfg: CostConfig, target: Target, drafter: Drafter) -> list[float] | None:
    """Quartiles of the seconds from a prefill to the size that a predictor picks, once per prompt.

    None without `policy.path`. The first prediction warms up.
    """
    if cfg.policy.path is None:
        return None
    method = Method(drafter, BlockSizePolicy(path=cfg.policy.path))
    method.bind(target)
    prompt = torch.arange(min(cfg.contexts)).remainder(target.embed_rows).tolist()
    traces = [decode(target, method, prompt, KeyedSampler(), 2) for _ in range(cfg.repeats + 1)]
    quartiles = np.quantile([trace.policy_s for trace in traces[1:]], [0.25, 0.5, 0.75])
    return [float(value) for value in quartiles]


def batch_grid(cfg: CostConfig, trained: int | None) -> BatchGrid:
    """What `batch` asks for: all widths that are verified, and the blocks drafted for them.

    A tree is grown from a block of the trained size.
    """
    sizes, trees, copies = set(cfg.sizes), set(cfg.trees), set(cfg.copies)
    drafted = sizes - {1}
    if trees and trained is not None:
        drafted |= {trained}
    return BatchGrid(
        batches=sorted(set(cfg.batch)),
        contexts=sorted(set(cfg.contexts)),
        verified=sorted(
            {1} | sizes | trees | copies
        ),  # 1: plain decoding, which others are compared with
        drafted=sorted(drafted),
        repeats=cfg.repeats,
    )


def batch_seconds(
    cfg: CostConfig, target: Target, drafter: Drafter, grid: BatchGrid
) -> list[BatchPoint]:
    """Points at the batch sizes, by the models' own code: engines run one sequence at a time."""
    eager = Target(target.model, target.tokenizer, target.name)
    drafter.bind(eager)
    able = drafter if isinstance(drafter, Batchable) else None
    return batch_points(eager, able, grid, seed=cfg.seed)


def cost_table(curve: CostCurve) -> Table:
    """Milliseconds per cycle: median and quartiles, and the draft's part."""
    title = f"ms per cycle, {curve.settings['target']}, {curve.settings['dtype']}"
    table = Table("kind", "B", "context", "cycle", "quartiles", "draft", "verify", title=title)
    for each in curve.points:
        quartiles = f"{1e3 * each.cycle_s_q25:.1f}-{1e3 * each.cycle_s_q75:.1f}"
        cells = (f"{1e3 * value:.1f}" for value in (each.cycle_s, each.draft_s, each.verify_s))
        cycle, draft, verify = cells
        shape = each.kind, str(each.block_size), str(each.context)
        table.add_row(*shape, cycle, quartiles, draft, verify)
    if curve.predictor_s is not None:
        low, middle, high = (1e3 * value for value in curve.predictor_s)
        table.caption = f"predictor: {middle:.2f} ms per prompt ({low:.2f}-{high:.2f})"
    return table


def batch_table(points: Sequence[BatchPoint]) -> Table:
    """Milliseconds of a forward over all sequences of a batch: median and quartiles."""
    title = f"ms per forward of a whole batch, {points[0].engine} whatever the engine"
    table = Table("batch", "part", "positions", "context", "ms", "quartiles", title=title)
    for each in points:
        quartiles = f"{1e3 * each.seconds_q25:.1f}-{1e3 * each.seconds_q75:.1f}"
        shape = map(str, (each.batch, each.part, each.positions, each.context))
        table.add_row(*shape, f"{1e3 * each.seconds:.1f}", quartiles)
    return table


@stage("cost", CostConfig)
def main(cfg: CostConfig) -> None:
    """Entry point."""
    run(cfg)


if __name__ == "__main__":
    main()
