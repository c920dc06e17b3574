"""Laws of the splits: near-duplicates stay together, and nothing but the texts decides."""

import random
from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest

from blockpilot.prompts.base import SPLITS, UNASSIGNED, Prompt
from blockpilot.prompts.splits import assign_splits, near_duplicate_groups, split_of_hash

WORDS = [f"word{i}" for i in range(400)]


def prompt(key: str, text: str, set_name: str = "s") -> Prompt:
    return Prompt(f"{set_name}/{key}", set_name, (text,), UNASSIGNED)


def random_text(rng: random.Random, n_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=n_words))


def with_one_word_changed(rng: random.Random, text: str) -> str:
    words = text.split()
    words[rng.randrange(len(words))] = "changed"
    return " ".join(words)


def slow_shingles(text: str) -> frozenset[tuple[str, ...]]:
    words = text.split()
    return frozenset(tuple(words[i : i + 8]) for i in range(len(words) - 7))


def slow_jaccard(a: str, b: str) -> float:
    x, y = slow_shingles(a), slow_shingles(b)
    return len(x & y) / len(x | y)


def corpus(seed: int, n: int = 120) -> list[str]:
    """Texts of which many are edited copies of earlier ones, so Jaccard takes all values."""
    rng = random.Random(seed)
    texts = [random_text(rng, rng.randint(9, 60)) for _ in range(n // 3)]
    while len(texts) < n:
        text = rng.choice(texts)
        if rng.random() < 0.5:
            text = with_one_word_changed(rng, text)
        cut = rng.randint(0, max(0, len(text.split()) - 9))
        texts.append(" ".join(text.split()[cut // 3 :]))
    return texts


def partition(labels: Sequence[int]) -> set[frozenset[int]]:
    members = defaultdict(set)
    for index, label in enumerate(labels):
        members[label].add(index)
    return {frozenset(group) for group in members.values()}


@pytest.mark.parametrize("seed", range(5))
def test_groups_are_the_components_of_all_pairs_compared_slowly(seed: int) -> None:
    texts = corpus(seed)
    component = list(range(len(texts)))
    for i in range(len(texts)):
        for j in range(i):
            if slow_jaccard(texts[i], texts[j]) >= 0.7:
                old, new = component[i], component[j]
                component = [new if c == old else c for c in component]
    expected = partition(component)
    assert partition(near_duplicate_groups(texts)) == expected
    assert 10 < len(expected) < len(texts) - 10  # there is something to join and to keep apart


def test_the_threshold_is_met_exactly_at_seven_tenths() -> None:
    shared = [f"w{i}" for i in range(14)]  # 7 shingles
    a, longer = " ".join(shared), " ".join([*shared, "x", "y", "z"])  # 7 of 10
    too_long = " ".join([*shared, "x", "y", "z", "q"])  # 7 of 11
    assert slow_jaccard(a, longer) == 0.7
    assert partition(near_duplicate_groups([a, longer])) == {frozenset({0, 1})}
    assert len(set(near_duplicate_groups([a, too_long]))) == 2


def test_short_prompts_are_compared_by_their_words() -> None:
    texts = ["What is DNA?", "what is  dna", "What is RNA?", "???", "!!!", "日本の首都は?"]
    groups = partition(near_duplicate_groups(texts))
    assert groups == {frozenset({0, 1}), *(frozenset({index}) for index in range(2, 6))}


def test_no_near_duplicate_crosses_a_border() -> None:
    texts = corpus(7, n=300)
    assigned = assign_splits([prompt(str(i), text) for i, text in enumerate(texts)], ())
    for a in assigned:
        for b in assigned:
            if a.split != b.split:
                assert slow_jaccard(a.turns[0], b.turns[0]) < 0.7


def test_a_conversation_has_one_split_wherever_it_comes_from() -> None:
    rng = random.Random(0)
    texts = [random_text(rng, 12) for _ in range(50)]
    both = [prompt(str(i), t, s) for s in ("a", "b") for i, t in enumerate(texts)]
    assigned = assign_splits(both, ())
    assert [p.split for p in assigned[:50]] == [p.split for p in assigned[50:]]


def test_order_does_not_matter() -> None:
    prompts = [prompt(str(i), text) for i, text in enumerate(corpus(3, n=200))]
    expected = {p.id: p.split for p in assign_splits(prompts, ())}
    shuffled = prompts[:]
    random.Random(1).shuffle(shuffled)
    assigned = assign_splits(shuffled, ())
    assert {p.id: p.split for p in assigned} == expected
    assert [p.id for p in assigned] == [p.id for p in shuffled]


def test_a_held_out_set_is_test_and_takes_its_near_duplicates_along() -> None:
    rng = random.Random(5)
    exam = [prompt(str(i), random_text(rng, 40), "exam") for i in range(30)]
    copies = [prompt(f"copy{i}", f"{p.turns[0]} and so on", "train") for i, p in enumerate(exam)]
    fresh = [prompt(f"new{i}", random_text(rng, 40), "train") for i in range(300)]
    assigned = assign_splits([*copies, *fresh, *exam], {"exam"})
    assert slow_jaccard(copies[0].turns[0], exam[0].turns[0]) >= 0.7
    assert {p.split for p in assigned[:30]} == {"test"}
    assert {p.split for p in assigned if p.set == "exam"} == {"test"}
    assert {p.split for p in assigned[30:330]} == set(SPLITS)


def test_shares_are_80_12_4_4() -> None:
    n = 20_000
    counts = Counter(split_of_hash(f"{i:016x}") for i in range(n))
    for split, share in zip(SPLITS, (0.80, 0.12, 0.04, 0.04), strict=True):
        sigma = (share * (1 - share) / n) ** 0.5
        assert abs(counts[split] / n - share) < 4 * sigma


def test_large_groups_are_not_drawn_to_one_split() -> None:
    """The smallest of many hashes is small; a split read off it directly would be the first."""
    rng = random.Random(2)
    base = [random_text(rng, 60) for _ in range(200)]
    prompts = [prompt(f"{i}-{k}", f"{text} {k}") for i, text in enumerate(base) for k in range(20)]
    assigned = assign_splits(prompts, ())
    per_group = Counter(p.split for p in assigned[::20])
    assert per_group["distill"] < 190


@pytest.mark.parametrize("n_own_words", [3, 5, 9, 14, 30])
def test_a_long_shared_format_makes_no_quadratic_work(
    n_own_words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed, for shares of own words that make all pairs alike, almost, or not."""
    from blockpilot.prompts import splits

    n_compared = 0
    original = splits._similar

    def counting(a: frozenset[int], b: frozenset[int]) -> bool:
        nonlocal n_compared
        n_compared += 1
        return original(a, b)

    monkeypatch.setattr(splits, "_similar", counting)
    rng = random.Random(0)
    shared = random_text(rng, 40)
    texts = [f"{random_text(rng, n_own_words)} {shared}" for _ in range(2_000)]
    alike = slow_jaccard(texts[0], texts[1]) >= 0.7
    n_groups = len(set(near_duplicate_groups(texts)))
    assert n_groups == 1 if alike else n_groups > 1_990
    assert n_compared < 20 * len(texts)
