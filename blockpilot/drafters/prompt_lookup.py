"""Prompt lookup: what followed the last tokens when they last occurred (Saxena, 2023).

No weights. A draft is as long as the text allows, and empty where nothing occurred before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from blockpilot.base.errors import UserError
from blockpilot.decoding.protocols import TargetModel
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
        self._text = IndexedText(self.max_ngram)
        self._text.extend([*view.prompt_ids.tolist(), *view.anchor.tolist()])

    def draft(self, view: View, n_slots: int) -> Draft:
        """At most `n_slots - 1` tokens."""
        found = self._text.followers(n_slots - 1)
        return Draft(torch.tensor(found, dtype=torch.int64, device=view.anchor.device))

    def observe(self, verdict: Verdict) -> None:
        """The text grows."""
        self._text.extend(verdict.tokens)


class IndexedText:
    """A growing text that knows where each of its runs of up to `max_ngram` tokens last ended."""

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram = max_ngram
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # place behind the latest occurrence

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. A run is known from when a token follows it."""
        for token in tokens:
            for ending in self._endings():
                self._after[ending] = len(self._tokens)
            self._tokens.append(token)

    def followers(self, n_tokens: int) -> list[int]:
        """At most `n_tokens` that followed the latest earlier occurrence of the longest ending that
        has one.
        """
        for ending in self._endings():
            if (place := self._after.get(ending)) is not None:
                return self._tokens[place : place + n_tokens]
        return []

    def _endings(self) -> Iterator[tuple[int, ...]]:
        """The last tokens, the longest run first."""
        for n in range(min(self.max_ngram, len(self._tokens)), 0, -1):
            yield tuple(self._tokens[-n:])
