"""Where the time of a decode goes: device events on a GPU, the host's clock on a CPU."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

import torch


class Clock:
    """Attributes the time between consecutive marks to named parts, in seconds.

    On a GPU a mark is an event on the stream, read only when the device has passed it, so marking
    never waits.
    `now` and `synchronize` can be replaced, for tests.
    """

    def __init__(
        self,
        device: torch.device,
        now: Callable[[], float] = time.perf_counter,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        self._events = device.type == "cuda"
        self._now = now
        self._synchronize = synchronize or (
            (lambda: torch.cuda.synchronize(device)) if self._events else (lambda: None)
        )
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        self._laps: list[int] = []  # marks
        self._begin = 0.0

    def start(self) -> None:
        """Begin a timed region: waits for work that was launched before it."""
        self._synchronize()
        self._marks.clear()
        self._laps.clear()
        self._begin = self._now()
        self.mark("start")

    def mark(self, part: str) -> None:
        """The time since the previous mark was spent on `part`."""
        stamp: float | torch.cuda.Event
        if self._events:
            stamp = torch.cuda.Event(enable_timing=True)
            stamp.record()
        else:
            stamp = self._now()
        self._marks.append((part, stamp))

    def lap(self) -> None:
        """A lap ends, and the next begins, at the last mark."""
        self._laps.append(len(self._marks) - 1)

    def lap_s(self, number: int) -> float:
        """Seconds between the calls `number` and `number` + 1 of `lap`, from 0.

        On a GPU only for laps that some later wait for the device has covered.
        """
        begin, end = (self._marks[self._laps[each]][1] for each in (number, number + 1))
        return _seconds(begin, end)

    def finish(self) -> tuple[float, dict[str, float]]:
        """Wall time of the region by the host's clock, read after a sync, and time per part."""
        self._synchronize()
        total = self._now() - self._begin
        parts: defaultdict[str, float] = defaultdict(float)
        for (_, before), (part, after) in zip(self._marks, self._marks[1:], strict=False):
            parts[part] += _seconds(before, after)
        return total, dict(parts)


def _seconds(before: float | torch.cuda.Event, after: float | torch.cuda.Event) -> float:
    if isinstance(before, float) and isinstance(after, float):
        return after - before
    assert isinstance(before, torch.cuda.Event)
    assert isinstance(after, torch.cuda.Event)
    return before.elapsed_time(after) / 1000
