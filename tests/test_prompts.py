"""Prompts, the sets written for this project, and loading several sets together."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from prompts_kit import BOXED, DATA, configured, load, loaded_once, write

from blockpilot.base.errors import UserError
from blockpilot.prompts.base import SPLITS, Prompt, PromptSet
from blockpilot.prompts.bundled import BundledSet
from blockpilot.prompts.docstrings import DocstringSet
from blockpilot.prompts.load import load_prompts
from blockpilot.prompts.splits import near_duplicate_groups

OURS = ("bundled", "chat-composed", "code-composed", "stdlib")


def test_the_hash_follows_the_conversation_and_nothing_else() -> None:
    one = Prompt("a/1", "a", ("x", "y"), "test")
    assert one.hash == Prompt("b/2", "b", ("x", "y"), "distill").hash
    assert re.fullmatch(r"[0-9a-f]{16}", one.hash)
    others = [
        Prompt("a/1", "a", ("x\ny",), "test"),
        Prompt("a/1", "a", ("y", "x"), "test"),
        Prompt("a/1", "a", ("y",), "test", system="x"),
        Prompt("a/1", "a", ("x", "y"), "test", system=""),
    ]
    assert len({p.hash for p in [one, *others]}) == 5


def test_bundled_prompts_are_enough_unique_and_mixed() -> None:
    prompts = load("bundled")
    kinds = Counter(p.id.removeprefix("bundled/").split("-")[0] for p in prompts)
    assert kinds["maths"] >= 60
    assert kinds["chat"] >= 60
    assert kinds["code"] >= 40
    assert len({p.hash for p in prompts}) == len(prompts)
    groups = near_duplicate_groups([p.turns[0].removesuffix(BOXED) for p in prompts])
    assert len(set(groups)) == len(prompts)
    assert [p.id for p in prompts[:3]] == [
        "bundled/maths-001",
        "bundled/chat-001",
        "bundled/code-001",
    ]
    assert all(p.turns[0].endswith(BOXED) == ("maths" in p.id) for p in prompts)


def test_an_unknown_kind_of_bundled_prompts_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="chat, code, maths"):
        BundledSet(name="bundled", held_out=False, formats={"poems": "{turn}"}).load()


@pytest.mark.parametrize(
    ("name", "at_least"), [("chat-composed", 1500), ("code-composed", 1000), ("stdlib", 1500)]
)
def test_sets_to_train_drafters_with_are_large_unique_and_split(name: str, at_least: int) -> None:
    prompts = loaded_once(name)
    assert len(prompts) >= at_least
    assert {p.split for p in prompts} == set(SPLITS)
    assert not any("{topic}" in p.turns[0] or "{name}" in p.turns[0] for p in prompts)
    assert [p.hash for p in prompts] == sorted(p.hash for p in prompts)


def test_nothing_to_train_with_is_near_a_public_test_prompt() -> None:
    ours = [p for name in OURS for p in loaded_once(name)]
    exams = load("humaneval")
    if DATA.is_dir():
        exams += load("gsm8k", path=DATA / "gsm8k_test.jsonl")
        exams += load("mt-bench", path=DATA / "eagle_mt_bench.jsonl")
    groups = near_duplicate_groups([turn for p in [*ours, *exams] for turn in p.turns])
    assert set(groups[: len(ours)]).isdisjoint(groups[len(ours) :])


@pytest.mark.parametrize("name", ["bundled", "chat-composed", "stdlib"])
def test_a_set_without_a_file_layout_refuses_a_path(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"'{name}'.*p.txt"):
        load(name, path=write(tmp_path / "p.txt", "Hello"))


def test_a_limit_takes_the_first_of_each_set_after_the_split() -> None:
    everything = load("bundled", "chat-composed")
    for split in (None, "distill", "test"):
        for limit in (1, 3, 10_000):
            expected = [
                p
                for name in ("bundled", "chat-composed")
                for p in [q for q in everything if q.set == name and split in (None, q.split)][
                    :limit
                ]
            ]
            assert load("bundled", "chat-composed", split=split, limit=limit) == expected


def test_the_splits_of_a_run_are_disjoint_and_complete() -> None:
    whole = load("bundled", "code-composed")
    parts = [p for split in SPLITS for p in load("bundled", "code-composed", split=split)]
    assert Counter(p.id for p in parts) == Counter(p.id for p in whole)
    seen: dict[str, str] = {}
    assert all(seen.setdefault(p.hash, p.split) == p.split for p in parts)


def test_a_copy_of_a_held_out_prompt_in_another_set_is_test(tmp_path: Path) -> None:
    question = "A baker makes 12 rolls in each of 7 trays and sells 80 of them. How many are left?"
    exam = configured("gsm8k")
    train = configured("gsm8k-train")
    file = write(tmp_path / "q.jsonl", {"question": question})
    alone = load_prompts({"t": train}, limit=None, path=file, split=None)[0]

    class Fixed:
        def __init__(self, inner: PromptSet) -> None:
            self.name, self.held_out, self.inner = inner.name, inner.held_out, inner

        def load(self, path: Path | None = None) -> list[Prompt]:
            return self.inner.load(file)

    both = load_prompts({"e": Fixed(exam), "t": Fixed(train)}, limit=None, path=None, split=None)
    assert [p.split for p in both] == ["test", "test"]
    assert alone.hash == both[1].hash


def test_mistakes_are_told_with_what_is_allowed(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", {"question": "How many?"})
    with pytest.raises(UserError, match="one set, but 2 are chosen"):
        load("gsm8k", "bundled", path=path)
    with pytest.raises(UserError, match="distill, policy, validation, test"):
        load("bundled", split="train")
    with pytest.raises(UserError, match="limit=0"):
        load("bundled", limit=0)
    with pytest.raises(UserError, match="no prompt set"):
        load()
    with pytest.raises(UserError, match=r"leaves no prompts.*test 1; held out for test: gsm8k"):
        load("gsm8k", path=path, split="policy")


def test_a_set_with_nothing_in_the_split_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert load("bundled", "humaneval", split="distill")
    assert "'humaneval' has no prompts in split 'distill'" in caplog.text


def test_copies_in_a_folder_stand_in_for_the_hub(tmp_path: Path) -> None:
    write(tmp_path / "gsm8k.jsonl", {"question": "How many?", "answer": "2"})
    sets = {name: configured(name) for name in ("gsm8k", "bundled")}
    found = load_prompts(sets, limit=1, path=None, split=None, folder=tmp_path)
    assert [prompt.turns[0] for prompt in found if prompt.set == "gsm8k"] == ["How many?" + BOXED]
    assert any(prompt.set == "bundled" for prompt in found), "has no copy: its own source"
    write(tmp_path / "gsm8k.csv", "question", "What?")
    with pytest.raises(UserError, match=r"gsm8k.csv and gsm8k.jsonl are one set"):
        load_prompts(sets, limit=1, path=None, split=None, folder=tmp_path)
    with pytest.raises(UserError, match=r"prompts.folder=.*nowhere: no such folder"):
        load_prompts(sets, limit=1, path=None, split=None, folder=tmp_path / "nowhere")


def test_docstrings_of_a_package_with_their_first_examples(tmp_path: Path) -> None:
    source = (
        "def shown(a, b=2):\n"
        '    """Add two numbers that may be of any size at all.\n\n'
        '    >>> shown(1)\n    3\n    >>> shown(2)\n    4\n    >>> shown(3)\n    5\n    """\n'
        'def bare(a):\n    """Say what this number would be in a far away country."""\n'
    )
    package = tmp_path / "somepackage"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    sys.path.insert(0, str(tmp_path))
    try:
        options = {"name": "d", "held_out": False, "packages": ["somepackage"]}
        found = {p.id: p.turns[0] for p in DocstringSet(**options, examples=2).load()}
        plain = {p.id: p.turns[0] for p in DocstringSet(**options, examples=0).load()}
        assert set(found) == set(plain) == {"d/somepackage.shown", "d/somepackage.bare"}
        text = found["d/somepackage.shown"]
        lines = [line.strip() for line in text.splitlines()]
        start = lines.index(">>> shown(1)")
        assert lines[start : start + 4] == [">>> shown(1)", "3", ">>> shown(2)", "4"]
        assert ">>> shown(3)" not in lines
        assert ">>>" not in plain["d/somepackage.shown"]
        assert found["d/somepackage.bare"] == plain["d/somepackage.bare"]
        with pytest.raises(UserError, match="prompt set 'd': package nowhere is not installed"):
            DocstringSet(name="d", held_out=False, packages=["nowhere"], examples=0).load()
    finally:
        sys.path.remove(str(tmp_path))
