"""What forwards over several sequences at once take, and what cycles would take by them.

Decoding is one sequence at a time. These points answer what a batch of sequences would gain from
drafts, as a prediction: all sequences are taken to be in the same phase, so that a cycle is one
draft and one target forward for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from blockpilot.base.errors import UserError

PARTS = ("verify", "draft")


@dataclass(frozen=True)
class BatchPoint:
    """Seconds of one forward over `batch` sequences of equal length: median and quartiles.

    `part` verify is a forward of the target over `positions` new positions of each sequence, which
    stand for a chain and for a tree alike; draft is a block of `positions` slots of each.
    """

    part: str
    batch: int
    positions: int
    context: int  # positions before them, of each sequence
    repeats: int
    seconds: float
    seconds_q25: float
    seconds_q75: float
    engine: str  # whose forwards these are: the models' own code, whatever engine the curve has


@dataclass(frozen=True)
class BatchCost:
    """Seconds of cycles at one batch size, from points of all of them."""

    points: Sequence[BatchPoint]
    batch: int

    def seconds(self, part: str, positions: ArrayLike, contexts: ArrayLike) -> NDArray[np.float64]:
        """Seconds [n] of forwards over positions [n] behind contexts [n].

        Linear between measured numbers of positions and contexts; outside the measured contexts the
        nearest one counts. Raises UserError for positions outside the measured ones.
        """
        sizes, places = np.asarray(positions), np.asarray(contexts)
        found = np.empty(sizes.shape)
        for size in np.unique(sizes):
            chosen = sizes == size
            found[chosen] = np.interp(places[chosen], *self._over_contexts(part, int(size)))
        return found

    def decode_s(
        self,
        drafted: Sequence[int],
        verified: Sequence[int],
        committed: Sequence[int],
        n_prompt_tokens: int,
    ) -> float:
        """Seconds in which a batch decodes, if all its sequences go through these cycles together.

        Counts per cycle are a record's: proposed tokens, verified positions, committed tokens. The
        sampler, the policy and the drafter's reading of the prompt are left out.
        """
        proposed = np.asarray(drafted, dtype=np.int64)
        ends = n_prompt_tokens + np.cumsum(committed, dtype=np.int64)
        places = ends - np.asarray(committed, dtype=np.int64)
        drafts = proposed > 0
        seconds = self.seconds("verify", verified, places).sum()
        seconds += self.seconds("draft", proposed[drafts] + 1, places[drafts]).sum()
        return float(seconds)

    @cached_property
    def _measured(self) -> dict[str, dict[int, dict[int, float]]]:
        """Seconds by part, context and positions."""
        measured: dict[str, dict[int, dict[int, float]]] = {part: {} for part in PARTS}
        for point in sorted(self.points, key=lambda point: (point.context, point.positions)):
            if point.batch == self.batch:
                at = measured[point.part].setdefault(point.context, {})
                at[point.positions] = point.seconds
        return measured

    def _over_contexts(self, part: str, size: int) -> tuple[list[int], list[float]]:
        """Measured contexts, and the seconds of a number of positions behind each."""
        costs = []
        for at in self._measured[part].values():
            sizes = list(at)
            if not sizes[0] <= size <= sizes[-1]:
                raise UserError(
                    f"no cost at batch size {self.batch} for {part} of {size} positions: measured "
                    f"are {sizes[0]}..{sizes[-1]}"
                )
            costs.append(float(np.interp(size, sizes, list(at.values()))))
        if not costs:
            raise UserError(f"no cost at batch size {self.batch} for {part}: nothing was measured")
        return list(self._measured[part]), costs
