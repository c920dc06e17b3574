"""Stage `cost`: what a cycle costs on this machine, per block size and context length.

    python -m blockpilot.cost +model=qwen3-4b weights=random drafter.checkpoint=random
    python -m blockpilot.cost policy.path=outputs/train/<run id>/predictor    # and its predictor
    python -m blockpilot.sweep cost=outputs/cost/<run id>/cost.json

    python -m blockpilot.cost batch=[1,4,16]    # and forwards over so many sequences at once

A dense model's cost depends on shapes only, so random weights give the real curve.
"""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from blockpilot.costs.curve import PARTS, CostCurve, CostPoint, cost_settings, load_cost
from blockpilot.costs.forwards import BatchGrid, batch_points
from blockpilot.decoding.loop import Method, check_prompt, decode
from blockpilot.decoding.protocols import Batchable, Drafter
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.target import Target
from blockpilot.decoding.types import Trace
from blockpilot.drafters.none import NoDrafter
from blockpilot.policies.blockpilot import BlockSizePolicy
from blockpilot.policies.fixed import FixedPolicy
from blockpilot.policies.tree import TreePolicy
from blockpilot.records.run_folder import RunFolder
from blockpilot.records.settings import keep_settings

log = logging.getLogger("blockpilot.cost")  # __name__ is __main__ under python -m

_ASIDE = ("paths", "threads", "tracker")  # settings that the curve's own identity leaves out


@dataclass(frozen=True)
class Cell:
    """Verified positions of a chain, or of a tree from a trained block."""

    size: int
    tree: bool


def run(cfg: CostConfig) -> CostCurve:
    """Measure the curve, print it and write cost.json into the run's folder.

    A curve that is there is not measured again: what was decided by it would be another's.
    """
    contexts = sorted(set(cfg.contexts))
    n_cells = (len(set(cfg.sizes)) + len(set(cfg.trees))) * len(contexts)
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
        points = measured(cfg, target, methods, contexts)
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
        f"cycle_ms/{'tree' if each.tree else 'b'}{each.block_size}/context{each.context}": 1e3
        * each.cycle_s
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


@contextmanager
def silent_drafters() -> Iterator[None]:
    """No warning of a low tau meanwhile: on noise every drafter has one."""
    logger = logging.getLogger("blockpilot.drafters")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def cost_methods(cfg: CostConfig, drafter: Drafter, target: Target) -> dict[Cell, Method]:
    """One bound method per chain size and tree; size 1 is plain decoding, without a drafter."""
    methods = {}
    for size in sorted(set(cfg.sizes)):
        policy = FixedPolicy(block_size=size, block_mode="draft")
        methods[Cell(size, False)] = Method(NoDrafter() if size == 1 else drafter, policy)
    for positions in sorted(set(cfg.trees)):
        methods[Cell(positions, True)] = Method(
            drafter, TreePolicy(nodes=positions - 1, cost=None, fit=None, online=False)
        )
    for method in methods.values():
        method.bind(target)
    # Without drafts a block of any size is one position: the curve would say what was not measured.
    if drafter.trained_block_size is None and set(cfg.sizes) - {1}:
        raise UserError(
            f"sizes={list(cfg.sizes)}: drafter {drafter.name} has no block size but 1; give "
            "sizes=[1], or a drafter"
        )
    return methods


def measured(
    cfg: CostConfig, target: Target, methods: dict[Cell, Method], contexts: list[int]
) -> list[CostPoint]:
    """Points of all methods and contexts, in shuffled rounds so that a slow moment hits them alike.

    The first round warms up. A cycle's cost is the decode loop's time over its cycles, without the
    drafter's reading of the prompt: an answer has many more cycles than the few that are timed.
    """
    budget = cfg.decoding.max_new_tokens
    generator = torch.Generator().manual_seed(cfg.seed)
    prompts = {}
    widest = max(method.policy.widest for method in methods.values())
    for context in contexts:
        prompts[context] = torch.randint(
            target.embed_rows, (context,), generator=generator
        ).tolist()
        if problem := check_prompt(target, prompts[context], budget, widest):
            raise UserError(f"contexts={contexts}: {problem}")
    cells = [(cell, context) for cell in methods for context in contexts]
    spent: defaultdict[tuple[Cell, int], list[dict[str, float]]] = defaultdict(list)
    order = random.Random(cfg.seed)
    for round_ in range(cfg.repeats + 1):
        order.shuffle(cells)
        for cell, context in cells:
            sampler = KeyedSampler(
                temperature=cfg.decoding.temperature,
                top_k=cfg.decoding.top_k,
                top_p=cfg.decoding.top_p,
                seed=cfg.seed,
            )
            trace = decode(target, methods[cell], prompts[context], sampler, budget)
            if round_:
                spent[cell, context].append(per_cycle(trace))
        log.info("round %d of %d", round_, cfg.repeats)
    ordered = sorted(spent, key=lambda key: (key[0].tree, key[0].size, key[1]))
    return [point(cell, context, spent[cell, context]) for cell, context in ordered]


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
    """What `batch` asks for: the widths of all sizes and trees, and the blocks drafted for them.

    A tree is grown from a block of the trained size.
    """
    sizes, trees = set(cfg.sizes), set(cfg.trees)
    drafted = sizes - {1}
    if trees and trained is not None:
        drafted |= {trained}
    return BatchGrid(
        batches=sorted(set(cfg.batch)),
        contexts=sorted(set(cfg.contexts)),
        verified=sorted({1} | sizes | trees),  # 1: plain decoding, which others are compared with
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


def per_cycle(trace: Trace) -> dict[str, float]:
    """Seconds per cycle, in all and by part, and `start_s` per answer."""
    parts = {name: getattr(trace, name) for name in ("decode_s", *PARTS)}
    for name in ("decode_s", "draft_s"):
        parts[name] -= trace.start_s
    parts = {name: seconds / len(trace.committed) for name, seconds in parts.items()}
    return parts | {"start_s": trace.start_s}


def point(cell: Cell, context: int, repeats: list[dict[str, float]]) -> CostPoint:
    """Medians and quartiles of some repeats."""
    low, middle, high = np.quantile([each["decode_s"] for each in repeats], [0.25, 0.5, 0.75])
    parts = {
        part: float(np.median([each[part] for each in repeats])) for part in (*PARTS, "start_s")
    }
    times = float(middle), float(low), float(high)
    return CostPoint(cell.size, context, len(repeats), *times, **parts, tree=cell.tree)


def cost_table(curve: CostCurve) -> Table:
    """Milliseconds per cycle: median and quartiles, and the draft's part."""
    title = f"ms per cycle, {curve.settings['target']}, {curve.settings['dtype']}"
    table = Table("B", "context", "cycle", "quartiles", "draft", "verify", title=title)
    for each in curve.points:
        quartiles = f"{1e3 * each.cycle_s_q25:.1f}-{1e3 * each.cycle_s_q75:.1f}"
        cells = (f"{1e3 * value:.1f}" for value in (each.cycle_s, each.draft_s, each.verify_s))
        cycle, draft, verify = cells
        size = f"{'tree ' if each.tree else ''}{each.block_size}"
        table.add_row(size, str(each.context), cycle, quartiles, draft, verify)
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
