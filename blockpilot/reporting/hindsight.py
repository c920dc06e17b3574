"""What a size per cycle would give in hindsight, from the accepted lengths that replays kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blockpilot import labels
from blockpilot.records.replays import read_replay
from blockpilot.records.schema import PLAIN
from blockpilot.records.store import read_records

Floats = NDArray[np.float64]


def per_cycle_gains(
    runs: Sequence[Path],
    examples: Sequence[str],
    sizes: Sequence[int],
    seconds: Floats,
) -> Floats | None:
    """Gain [P] of each example when every cycle has the size that is best in hindsight.

    `examples` are prompt ids, with `#turn` behind them for later turns; `seconds` [P, m] what a
    cycle costs each of them at each size (ones: the gain is tau). Averaged over the answers of
    runs with other seeds. None where a run kept no replay.
    """
    place = {example: number for number, example in enumerate(examples)}
    found: list[list[float]] = [[] for _ in examples]
    for run in runs:
        if not (run / "replay").is_dir():
            return None
        records = read_records(run)
        rows = records[(records["method"] == PLAIN) & (records["status"] == "ok")]
        for row in rows.to_dict("records"):
            turn = f"#{row['turn']}" if row["turn"] else ""
            number = place.get(f"{row['prompt_id']}{turn}")
            if number is None or row["n_new_tokens"] < 2:
                continue
            _, replay, _ = read_replay(run, {str(key): value for key, value in row.items()})
            by_size = {plan.verified: kept for plan, kept in replay.accepted.items()}
            if missing := set(sizes) - {1} - set(by_size):
                raise AssertionError(f"{run} has rows but no anchors of size {min(missing)}")
            none = np.zeros(row["n_new_tokens"] - 1, dtype=np.int64)
            accepted = [none if size == 1 else by_size[size].numpy() for size in sizes]
            least = labels.hindsight_seconds(np.stack(accepted, axis=1), seconds[number])
            found[number].append((row["n_new_tokens"] - 1) / least)
    return np.array([np.mean(gains) if gains else np.nan for gains in found])
