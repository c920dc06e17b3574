"""Prompt lookup: what followed the last tokens when they last occurred (Saxena, 2023).

No weights. A draft is as long as the text allows, and empty where nothing occurred before.
"""

from __future__ import annotations

import torch

from blockpilot.base.errors import UserError
from blockpilot.decoding.protocols import TargetModel
from blockpilot.decoding.text import IndexedText
from blockpilot.decoding.types import Draft, Verdict, View


class PromptLookupDrafter:
    """Matches the longest of `max_ngram`..1 last tokens in prompt and text, the latest place first.

    `block_size` is the size that a policy without one of its own asks for.
    """

    name = "prompt_lookup"
    shape: str | None = None
    has_marginals = False
    feature_layers: tuple[int, ...] = ()

    def __init__(self, *, max_ngram: int, block_size: int) -> None:
        if max_ngram < 1:
            raise UserError(f"drafter.max_ngram={max_ngram}: allowed are numbers >= 1")
        if block_size < 2:
            raise UserError(f"drafter.block_size={block_size}: allowed are numbers >= 2")
        self.max_ngram = max_ngram
        self.fingerprint: str | None = f"max_ngram={max_ngram}"
        self.trained_block_size: int | None = block_size

    def bind(self, target: TargetModel) -> None:
        """Fits every target."""

    def start(self, view: View, capacity: int) -> None:
        """The prompt and the first token."""
        self._text = IndexedText(self.max_ngram, view.prompt_ids.tolist())
        self._text.extend(view.anchor.tolist())

    def draft(self, view: View, n_slots: int) -> Draft:
        """At most `n_slots - 1` tokens."""
        copy = self._text.copy(n_slots - 1)
        tokens = torch.tensor(copy.tokens, dtype=torch.int64, device=view.anchor.device)
        return Draft(tokens, origins=copy.origins)

    def observe(self, verdict: Verdict) -> None:
        """The text grows."""
        self._text.extend(verdict.tokens)
