"""No drafter: with block size 1 the loop is plain decoding, the baseline of every table."""

from __future__ import annotations

from blockpilot.decoding.protocols import TargetModel
from blockpilot.decoding.types import Draft, Verdict, View


class NoDrafter:
    """Drafter `none`: proposes nothing, reads no features."""

    name = "none"
    fingerprint: str | None = None
    shape: str | None = None
    has_marginals = False
    trained_block_size: int | None = None
    feature_layers: tuple[int, ...] = ()

    def bind(self, target: TargetModel) -> None:
        """Fits every target."""

    def start(self, view: View, capacity: int) -> None:
        """Keeps no state."""

    def draft(self, view: View, n_slots: int) -> Draft:
        """An empty draft whatever the block size: the anchor is verified alone."""
        return Draft(view.anchor[:0])

    def observe(self, verdict: Verdict) -> None:
        """Keeps no state."""
