"""What a size per cycle, or a branch, would give in hindsight, from what replays kept."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from blockpilot.records.run_folder import RunFolder
from blockpilot.records.schema import PLAIN
from blockpilot.stats.arrays import Floats, Ints
from blockpilot.stats.oracles import hindsight_seconds
from blockpilot.stats.tau import example_names

log = logging.getLogger(__name__)


def per_cycle_gains(
    runs: Sequence[RunFolder],
    examples: Sequence[str],
    sizes: Sequence[int],
    seconds: Floats,
    width: int | None = None,
) -> Floats | None:
    """Gain [P] of each example when every cycle has the size that is best in hindsight.

    `examples` are names (`example_names`); `seconds` [P, m] what a cycle costs each of them at each
    size (ones: the gain is tau). With `width` a cycle may follow the right one of the drafter's
    `width` best tokens in every slot of its trained block: more than any tree of that width can
    give at the cost of a chain. Averaged over the answers of runs with other seeds. None where a
    run kept no replay, or only the anchors that its cycles visit.
    """
    number_of = {example: number for number, example in enumerate(examples)}
    gains: list[list[float]] = [[] for _ in examples]  # of each example's answers
    for run in runs:
        if not run.has_replays:
            return None
        records = run.records()
        rows = records[(records["method"] == PLAIN) & (records["status"] == "ok")]
        rows = rows.assign(example=example_names(rows))
        for row in rows.to_dict("records"):
            number = number_of.get(row["example"])
            if number is None or row["n_new_tokens"] < 2:
                continue
            _, replay, _ = run.replay({str(key): value for key, value in row.items()})
            if replay.marginals is None:
                log.warning(
                    "nothing in hindsight: %s was made with replay.marginals=false", run.path
                )
                return None
            n_anchors = row["n_new_tokens"] - 1
            if width is None:
                by_size = {block.verified: kept.numpy() for block, kept in replay.accepted.items()}
                accepted = _accepted_blocks(by_size, sizes, n_anchors)
            else:
                accepted = _accepted_branches(replay.marginals.rank.numpy(), sizes, width)
            gains[number].append(n_anchors / hindsight_seconds(accepted, seconds[number]))
    return np.array([np.mean(answers) if answers else np.nan for answers in gains])


def _accepted_blocks(by_size: Mapping[int, Ints], sizes: Sequence[int], n_anchors: int) -> Ints:
    """Accepted proposals [A, m] of a block of each size at every anchor."""
    held = {**by_size, 1: np.zeros(n_anchors, dtype=np.int64)}
    if missing := set(sizes) - set(held):
        raise AssertionError(f"a replay has rows but no anchors of size {min(missing)}")
    return np.stack([held[size] for size in sizes], axis=1).astype(np.int64)


def _accepted_branches(ranks: Ints, sizes: Sequence[int], width: int) -> Ints:
    """Accepted proposals [A, m] of the best branch, by each slot's rank of the answer's token."""
    lengths = ((ranks >= 0) & (ranks < width)).cumprod(axis=1).sum(axis=1)
    return np.stack([np.minimum(lengths, size - 1) for size in sizes], axis=1).astype(np.int64)
