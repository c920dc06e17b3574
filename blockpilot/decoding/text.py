"""A growing text that knows where its last tokens occurred before.

Kept token by token, so that asking costs the same however long the text is: a scan would cost a
draft on long prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from blockpilot.decoding.types import Origin

_NEW: Sequence[int] = ()


@dataclass(frozen=True)
class Match:
    """The longest ending of a text that occurred before: its tokens, and the places behind its
    earlier occurrences, the latest last. Without one the length is 0.
    """

    length: int
    places: Sequence[int]


@dataclass(frozen=True)
class Copy:
    """Tokens of the text, and which part of it each stands in."""

    tokens: list[int]
    origins: list[Origin]


class IndexedText:
    """Finds endings of up to `max_ngram` tokens; of each it knows all earlier occurrences."""

    def __init__(self, max_ngram: int, prompt: Sequence[int] = ()) -> None:
        self.max_ngram, self.n_prompt = max_ngram, len(prompt)
        self.tokens: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}
        self.extend(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. A run of tokens is known from when a token follows it."""
        for token in tokens:
            for ending in self._endings():
                self._places.setdefault(ending, []).append(len(self.tokens))
            self.tokens.append(token)

    def match(self) -> Match:
        """Where the longest ending that has an earlier occurrence occurred."""
        for ending in self._endings():
            if places := self._places.get(ending, _NEW):
                return Match(len(ending), places)
        return Match(0, _NEW)

    def agreement(self, place: int, most: int) -> int:
        """Tokens before `place` that equal the last ones of the text, `most` of them counted: a
        match that may be longer than `max_ngram`.
        """
        tokens, end = self.tokens, len(self.tokens)
        n = 0
        while n < min(most, place) and tokens[place - 1 - n] == tokens[end - 1 - n]:
            n += 1
        return n

    def at(self, place: int, n_tokens: int) -> Copy:
        """At most `n_tokens` from a place on."""
        end = min(place + n_tokens, len(self.tokens))
        origins = [Origin.PROMPT if p < self.n_prompt else Origin.ANSWER for p in range(place, end)]
        return Copy(self.tokens[place:end], origins)

    def copy(self, n_tokens: int) -> Copy:
        """What followed the latest earlier occurrence of the longest ending that has one."""
        places = self.match().places
        return self.at(places[-1], n_tokens) if places else Copy([], [])

    def _endings(self) -> Iterator[tuple[int, ...]]:
        """The last tokens, the longest run first."""
        for n in range(min(self.max_ngram, len(self.tokens)), 0, -1):
            yield tuple(self.tokens[-n:])
