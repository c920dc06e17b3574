"""Which split a prompt belongs to: by hash of the conversation, near-duplicates together.

Two conversations are near-duplicates when the Jaccard index of their word 8-gram sets is at
least 0.7; conversations shorter than 8 words are compared by equality of their words. Groups are
the connected components of that relation. A group's split is drawn from the smallest
conversation hash in it, so it depends on the texts alone: not on order, limit, rank or set.

Limit: only prompts that are passed together can be compared. A near-duplicate in a set that
another run loads is not seen, and a group that spans two sets can land elsewhere when only one
of them is loaded. Load every set that a comparison rests on at once.
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import DisjointSet

from blockpilot.prompts.base import DISTILL, POLICY, TEST, VALIDATION, Prompt

SHINGLE_WORDS = 8
MIN_JACCARD_TENTHS = 7  # an integer, so that the boundary is exact
CUMULATIVE_PERCENT = ((80, DISTILL), (92, POLICY), (96, VALIDATION), (100, TEST))

_WORD = re.compile(r"\w+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def assign_splits(prompts: Sequence[Prompt], held_out_sets: Collection[str]) -> list[Prompt]:
    """The same prompts in the same order, each with its split.

    Args:
        prompts: all prompts of all sets loaded, before any limit.
        held_out_sets: names of sets that are test as a whole; near-duplicates of their prompts
            in other sets become test as well.
    """
    groups = near_duplicate_groups([_text(prompt) for prompt in prompts])
    smallest: dict[int, str] = {}
    held_out: set[int] = set()
    for prompt, group in zip(prompts, groups, strict=True):
        smallest[group] = min(prompt.hash, smallest.get(group, prompt.hash))
        if prompt.set in held_out_sets:
            held_out.add(group)
    split_of = {
        group: TEST if group in held_out else split_of_hash(key) for group, key in smallest.items()
    }
    return [
        replace(prompt, split=split_of[group])
        for prompt, group in zip(prompts, groups, strict=True)
    ]


def split_of_hash(conversation_hash: str) -> str:
    """The split drawn by one conversation hash: 80% distill, 12% policy, 4% validation, 4% test.

    It is hashed once more because the smallest hash of a large group is no uniform draw.
    """
    digest = hashlib.sha256(f"split:{conversation_hash}".encode()).digest()
    percent = int.from_bytes(digest[:8], "big") * 100 >> 64
    return next(split for bound, split in CUMULATIVE_PERCENT if percent < bound)


def near_duplicate_groups(texts: Sequence[str]) -> list[int]:
    """A group number for every text; equal numbers for texts linked by near-duplicates.

    Equal word sequences are merged first; the rest is an exact similarity join (see `_holders`).
    """
    groups = DisjointSet(range(len(texts)))
    first_with: dict[str, int] = {}
    words_of = [_WORD.findall(text.lower()) for text in texts]
    distinct = []
    for index, words in enumerate(words_of):
        twin = first_with.setdefault(" ".join(words) or texts[index].strip(), index)
        groups.merge(index, twin)
        if twin == index and len(words) >= SHINGLE_WORDS:
            distinct.append(index)
    shingles = [_shingles(hashes) for hashes in _word_hashes(words_of[i] for i in distinct)]
    as_sets: dict[int, frozenset[int]] = {}
    for holders in _holders(shingles):
        for document, _ in holders:
            if document not in as_sets:
                as_sets[document] = frozenset(shingles[document].tolist())
        clusters: list[list[int]] = []
        for document, indexed in holders:
            mine = [document] if indexed else []
            others = []
            for cluster in clusters:
                linked = groups.connected(distinct[document], distinct[cluster[0]])
                if linked or any(_similar(as_sets[document], as_sets[k]) for k in cluster):
                    groups.merge(distinct[document], distinct[cluster[0]])
                    cluster += mine
                    mine = cluster
                else:
                    others.append(cluster)
            clusters = [*others, mine] if mine else others
    return [groups[index] for index in range(len(texts))]


def _similar(a: frozenset[int], b: frozenset[int]) -> bool:
    common = len(a & b)
    return 10 * common >= MIN_JACCARD_TENTHS * (len(a) + len(b) - common)


def _text(prompt: Prompt) -> str:
    """What is compared: the user's words. A system message is often shared by a whole set."""
    return "\n".join(prompt.turns)


def _word_hashes(documents: Iterable[list[str]]) -> Iterator[NDArray[np.uint64]]:
    number: dict[str, int] = {}
    for words in documents:
        numbers = [number.setdefault(word, len(number) + 1) for word in words]
        mixed = np.array(numbers, dtype=np.uint64) * _MULTIPLIER
        yield (mixed ^ (mixed >> np.uint64(29))) * _MULTIPLIER


def _shingles(word_hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Distinct 64-bit hashes of all runs of `SHINGLE_WORDS` words."""
    n = len(word_hashes) - SHINGLE_WORDS + 1
    rolled = np.zeros(n, dtype=np.uint64)
    for offset in range(SHINGLE_WORDS):
        rolled = rolled * _MULTIPLIER + word_hashes[offset : offset + n]
        rolled ^= rolled >> np.uint64(32)
    return np.unique(rolled)


def _holders(shingles: list[NDArray[np.uint64]]) -> Iterator[list[tuple[int, bool]]]:
    """For every shingle that can link documents: (document, indexed) of those that hold it.

    This is the prefix filter of Bayardo et al. (2007) with the shorter index prefix of Xiao et
    al. (2008). Sort each set by global frequency, rarest first. Two sets of sizes m <= n with
    Jaccard >= t share an element among the first m - ceil(2t/(1+t) m) + 1 of the smaller one
    (`indexed`) and the first n - ceil(t n) + 1 of the larger one, so only such pairs need a look.
    Holders come by increasing size; a pair counts when its first member is `indexed`.
    """
    if not shingles:
        return
    sizes = np.array([len(s) for s in shingles])
    by_size = np.argsort(sizes, kind="stable")
    sizes = sizes[by_size]
    _, inverse, counts = np.unique(
        np.concatenate([shingles[i] for i in by_size]), return_inverse=True, return_counts=True
    )
    document = np.repeat(np.arange(len(sizes)), sizes)
    element = inverse[np.lexsort((inverse, counts[inverse], document))]
    position = np.arange(len(element)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    t = MIN_JACCARD_TENTHS
    probe_prefix = sizes - (t * sizes + 9) // 10 + 1
    index_prefix = sizes - (2 * t * sizes + t + 9) // (t + 10) + 1
    kept = (position < probe_prefix[document]) & (counts[element] > 1)
    indexed = (position < index_prefix[document])[kept]
    element, document = element[kept], document[kept]
    by_element = np.argsort(element, kind="stable")
    boundaries = np.flatnonzero(np.diff(element[by_element])) + 1
    for entries in np.split(by_element, boundaries):
        if indexed[entries].any():
            yield list(
                zip(by_size[document[entries]].tolist(), indexed[entries].tolist(), strict=True)
            )
