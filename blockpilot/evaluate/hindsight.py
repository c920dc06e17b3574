"""What a size per cycle, or a branch, would give in hindsight, from what replays kept."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blockpilot.decoding.anchors import Replay
from blockpilot.records.run_folder import RunFolder
from blockpilot.records.schema import PLAIN
from blockpilot.records.store import read_records
from blockpilot.stats import labels
from blockpilot.stats.labels import Floats
from blockpilot.stats.tau import example_names

log = logging.getLogger(__name__)


def per_cycle_gains(
    runs: Sequence[Path],
    examples: Sequence[str],
    sizes: Sequence[int],
    seconds: Floats,
    width: int | None = None,
) -> Floats | None:
    """Gain [P] of each example when every cycle has the size that is best in hindsight.

    `examples` are names (`example_names`); `seconds` [P, m] what a
    cycle costs each of them at each size (ones: the gain is tau). With `width` a cycle may follow
    the right one of the drafter's `width` best tokens in every slot of its trained block: more than
    any tree of that width can give at the cost of a chain. Averaged over the answers of runs with
    other seeds. None where a run kept no replay, or only the anchors that its cycles visit.
    """
    place = {example: number for number, example in enumerate(examples)}
    found: list[list[float]] = [[] for _ in examples]
    for run in runs:
        if not (run / "replay").is_dir():
            return None
        records = read_records(run)
        rows = records[(records["method"] == PLAIN) & (records["status"] == "ok")]
        rows = rows.assign(example=example_names(rows))
        for row in rows.to_dict("records"):
            number = place.get(row["example"])
            if number is None or row["n_new_tokens"] < 2:
                continue
            _, replay, _ = RunFolder(run).replay({str(key): value for key, value in row.items()})
            if replay.marginals is None:
                log.warning("nothing in hindsight: %s was made with replay.marginals=false", run)
                return None
            accepted = _accepted(replay, sizes, width, row["n_new_tokens"] - 1)
            least = labels.hindsight_seconds(accepted, seconds[number])
            found[number].append((row["n_new_tokens"] - 1) / least)
    return np.array([np.mean(gains) if gains else np.nan for gains in found])


def _accepted(
    replay: Replay, sizes: Sequence[int], width: int | None, n_anchors: int
) -> NDArray[np.int64]:
    """Accepted proposals [A, m] at every anchor and size."""
    if width is not None:
        assert replay.marginals is not None
        rank = replay.marginals.rank.numpy()
        found = ((rank >= 0) & (rank < width)).cumprod(axis=1).sum(axis=1)
        return np.stack([np.minimum(found, size - 1) for size in sizes], axis=1).astype(np.int64)
    by_size = {plan.verified: kept.numpy() for plan, kept in replay.accepted.items()}
    by_size[1] = np.zeros(n_anchors, dtype=np.int16)
    if missing := set(sizes) - set(by_size):
        raise AssertionError(f"a replay has rows but no anchors of size {min(missing)}")
    return np.stack([by_size[size] for size in sizes], axis=1).astype(np.int64)
