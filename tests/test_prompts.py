"""Prompt sets: files in their layouts, bad input, bundled data, loading several sets together."""

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from blockpilot.errors import UserError
from blockpilot.prompts.base import SPLITS, UNASSIGNED, Prompt, PromptSet
from blockpilot.prompts.bundled import BundledSet
from blockpilot.prompts.hub import HubRows
from blockpilot.prompts.load import load_prompts
from blockpilot.prompts.local import LocalSet, PackageRows
from blockpilot.prompts.splits import near_duplicate_groups
from blockpilot.prompts.tabular import TabularSet

ROOT = Path(__file__).resolve().parents[1]
CONF = sorted((ROOT / "conf" / "prompts").glob("*.yaml"))
DATA = ROOT.parent / "shared" / "data"
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
OURS = ("bundled", "chat-composed", "code-composed", "stdlib")

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="shared data files are not here")


def configured(name: str) -> PromptSet:
    built: dict[str, PromptSet] = instantiate(
        OmegaConf.load(ROOT / "conf" / "prompts" / f"{name}.yaml"), _convert_="all"
    )
    return built[name]


def load(
    *names: str, path: Path | None = None, split: str | None = None, limit: int | None = None
) -> list[Prompt]:
    return load_prompts({n: configured(n) for n in names}, limit=limit, path=path, split=split)


@cache
def loaded_once(name: str) -> list[Prompt]:
    return load(name)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write_file(name: str, *lines: Any) -> Path:
        path = tmp_path / name
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        return path

    return write_file


# --- the values -------------------------------------------------------------------------------


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


# --- files ------------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "gsm8k": ({"question": "How many?", "answer": "#### 2"}, "0", ("How many?",)),
    "mt-bench": ({"question_id": 81, "category": "c", "turns": ["a", "b"]}, "81", ("a", "b")),
    "humaneval": ({"task_id": "HumanEval/7", "prompt": "def f():"}, "HumanEval/7", ("def f():",)),
    "mbpp": ({"task_id": 11, "text": "Write f.", "code": "", "test_list": []}, "11", ("Write f.",)),
    "sharegpt": (
        {
            "id": "x_0",
            "conversations": [
                {"from": "human", "value": "hi"},
                {"from": "gpt", "value": "hello"},
                {"from": "human", "value": "bye"},
            ],
        },
        "x_0",
        ("hi", "bye"),
    ),
    "prompt": ({"prompt": "go"}, "0", ("go",)),
    "turns": ({"turns": ["go", "on"]}, "0", ("go", "on")),
    "messages": (
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        "0",
        ("q",),
    ),
    "alpaca": ({"instruction": "Sort", "input": "b a", "output": ""}, "0", ("Sort\n\nb a",)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_layouts_are_known_by_their_keys(layout: str, write: Any) -> None:
    row, key, turns = LAYOUTS[layout]
    (prompt,) = LocalSet(name="s", held_out=False, path=write("p.jsonl", row)).load()
    assert prompt == Prompt(f"s/{key}", "s", turns, UNASSIGNED)


def test_a_system_message_is_kept(write: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}]
    (prompt,) = load("local", path=write("p.jsonl", {"messages": messages}))
    assert (prompt.system, prompt.turns) == ("Be brief.", ("q",))


def test_all_kinds_of_files_give_the_same_prompts(write: Any, tmp_path: Path) -> None:
    import pandas as pd

    rows = [{"prompt": "first, with a comma"}, {"prompt": "zweite: ä 日本"}]
    paths = [
        write("a.jsonl", rows[0], "", rows[1]),
        write("b.json", json.dumps(rows, indent=1)),
        write("c.txt", rows[0]["prompt"], "   ", rows[1]["prompt"]),
        write("d.csv", "prompt", '"first, with a comma"', rows[1]["prompt"]),
        tmp_path / "e.parquet",
        tmp_path / "f.jsonl.gz",
        tmp_path / "g.txt",
    ]
    pd.DataFrame(rows).to_parquet(paths[4])
    paths[5].write_bytes(gzip.compress(paths[0].read_bytes()))
    paths[6].write_bytes(b"\xef\xbb\xbf" + paths[2].read_bytes().replace(b"\n", b"\r\n"))
    expected = load("local", path=paths[0])
    assert [p.id for p in expected] == ["local/0", "local/1"]
    for path in paths[1:]:
        assert load("local", path=path) == expected, path.name


def test_a_line_separator_inside_a_text_does_not_split_the_row(write: Any) -> None:
    path = write("p.jsonl", json.dumps({"prompt": "a\u2028b\u0085c"}, ensure_ascii=False))
    assert [p.turns for p in load("local", path=path)] == [("a\u2028b\u0085c",)]


BAD_FILES: dict[str, tuple[str, bytes, str]] = {
    "json": ("p.jsonl", b'{"prompt": "a"}\n\n{"prompt": "b"\n', "p.jsonl:3: not valid JSON"),
    "array": ("p.json", b'[{"prompt": "a"},\n\n {"prompt": b}]', "p.json:3: not valid JSON"),
    "no object": ("p.jsonl", b'{"prompt": "a"}\n7\n', "p.jsonl:2: expected a JSON object"),
    "keys": ("p.jsonl", b'{"prompt": "a"}\n{"word": 1}\n', "p.jsonl:2: no known layout: keys word"),
    "type": ("p.jsonl", b'{"prompt": 3}', "p.jsonl:1: expected a list of messages, got int"),
    "message": ("p.jsonl", b'{"turns": ["a", 4]}', "p.jsonl:1: a message must be text"),
    "blank": ("p.jsonl", b'{"prompt": " "}', "p.jsonl:1: 'prompt' holds no user message"),
    "surrogate": ("p.jsonl", b'{"prompt": "\\ud800"}', "p.jsonl:1: text is not valid Unicode"),
    "utf-8": ("p.txt", b"good\n\xff\xfe\n", "p.txt: not UTF-8 text"),
    "same id": ("p.jsonl", b'{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}', "occurs twice"),
    "deep": ("p.jsonl", b"[" * 200_000, "JSON is nested too deeply"),
    "csv": ("p.csv", b"prompt,id\na,1\nb\n", "p.csv:3: number of fields differs"),
    "gzip": ("p.txt.gz", b"plain", "p.txt.gz: cannot be read"),
    "parquet": ("p.parquet", b"plain", "p.parquet: not a Parquet file"),
    "suffix": ("p.xlsx", b"x", "allowed: .jsonl, .json, .txt, .csv, .parquet"),
    "empty": ("p.jsonl", b"", "p.jsonl: no prompts in it"),
    "empty array": ("p.json", b"[]", "p.json: no prompts in it"),
    "only blanks": ("p.txt", b"\n \n", "p.txt: no prompts in it"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_refused_in_one_line_with_its_place(kind: str, tmp_path: Path) -> None:
    name, content, message = BAD_FILES[kind]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        load("local", path=tmp_path / name)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    for name in ("none.jsonl", "folder.jsonl"):
        with pytest.raises(UserError, match="no such file"):
            load("local", path=tmp_path / name)
    with pytest.raises(UserError, match=re.escape("prompts.path=")):
        load("local")


# --- published sets ---------------------------------------------------------------------------


@pytest.mark.parametrize("file", CONF, ids=lambda file: file.stem)
def test_every_yaml_builds_its_set_without_a_network(file: Path) -> None:
    assert file.read_text().startswith("# @package prompts.sets\n")
    built = instantiate(OmegaConf.load(file), _convert_="all")
    assert list(built) == [file.stem] == [built[file.stem].name]


def test_all_sets_that_the_field_tests_on_are_held_out() -> None:
    held_out = {file.stem for file in CONF if configured(file.stem).held_out}
    assert held_out == {
        *("gsm8k", "math500", "aime24", "aime25", "humaneval", "mbpp", "swe-bench", "mt-bench"),
        *("livecodebench", "alpaca"),
    }


ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "gsm8k": ({"question": "1+{x}?", "answer": "3"}, "0", "1+{x}?" + BOXED),
    "gsm8k-train": ({"question": "1+1?", "answer": "2"}, "0", "1+1?" + BOXED),
    "math500": ({"problem": "$x$", "unique_id": "test/a/1.json"}, "test/a/1.json", "$x$" + BOXED),
    "aime24": ({"id": 60, "problem": "P"}, "60", "P" + BOXED),
    "aime25": ({"problem_idx": 1, "problem": "P"}, "1", "P" + BOXED),
    "mbpp": ({"task_id": 2, "prompt": "Write f.", "test_list": ["t"]}, "2", "Write f."),
    "swe-bench": (
        {"instance_id": "a__b-1", "problem_statement": "Broken"},
        "a__b-1",
        "Problem Statement:\nBroken\nPlease fix the issue described above.",
    ),
    "alpaca": ({"instruction": "Sort", "input": ""}, "0", "Sort"),
    "sharegpt": (
        {
            "id": "q",
            "conversations": [{"from": "human", "value": "a"}, {"from": "human", "value": "b"}],
        },
        "0",
        "a",
    ),
    "copa": (
        {"premise": "It rained.", "choice1": "C", "choice2": "D", "idx": 4},
        "4",
        "It rained. A: C B: D",
    ),
    "wsc": (
        {"text": "Tom said he left.", "span1_text": "Tom", "span2_text": "he", "idx": 0},
        "0",
        'Tom said he left. In this text, does "he" refer to "Tom"?',
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_hub_and_file_give_the_same_prompt(
    name: str, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    row, key, text = ROWS[name]
    calls: list[tuple[Any, ...]] = []

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return datasets.Dataset.from_list([{**row, "unread": 1}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (from_hub,) = load(name)
    (from_file,) = load(name, path=write("p.jsonl", row))
    assert from_hub == from_file
    assert (from_hub.id, from_hub.turns) == (f"{name}/{key}", (text,))
    assert len(calls) == 1


def test_the_hub_is_asked_for_repository_subset_split_and_revision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import datasets

    seen: dict[str, Any] = {}

    def load_dataset(repo: str, subset: str | None, **kwargs: Any) -> Any:
        seen.update(repo=repo, subset=subset, **kwargs)
        return datasets.Dataset.from_list([{"question": "q", "answer": "a"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    load("gsm8k-train")
    assert seen == {
        "repo": "openai/gsm8k",
        "subset": "main",
        "split": "train",
        "revision": "main",
        "data_files": None,
    }


def test_the_format_of_livecodebench_depends_on_the_starter_code(write: Any) -> None:
    path = write(
        "p.jsonl",
        {"question_id": "1", "question_content": "Q", "starter_code": "class S:"},
        {"question_id": "2", "question_content": "Q", "starter_code": ""},
    )
    with_code, without = load("livecodebench", path=path)
    assert "```python\nclass S:\n```" in with_code.turns[0]
    assert "```python\n# YOUR CODE HERE\n```" in without.turns[0]


def test_optional_columns_and_nested_ones(write: Any) -> None:
    (alpaca,) = load("alpaca", path=write("a.jsonl", {"instruction": "Sort", "input": "b a"}))
    assert alpaca.turns == ("Sort\n\nInput:\nb a",)
    target = {"span1_text": "Tom", "span2_text": "he"}
    (wsc,) = load("wsc", path=write("w.jsonl", {"text": "T.", "target": target, "idx": 3}))
    assert wsc.turns == ('T. In this text, does "he" refer to "Tom"?',)


def test_both_names_of_the_turns_of_mt_bench(write: Any) -> None:
    published = write("a.jsonl", {"question_id": 81, "category": "c", "turns": ["a", "b"]})
    on_hub = write("b.jsonl", {"prompt_id": 81, "category": "c", "prompt": ["a", "b"]})
    assert load("mt-bench", path=published) == load("mt-bench", path=on_hub)


def test_conversations_without_a_user_message_are_left_out_and_counted(
    write: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"id": "a", "conversations": [{"from": "gpt", "value": "Hello"}]},
        {"id": "b", "conversations": []},
        {"id": "c", "conversations": [{"from": "human", "value": "Hi"}]},
    ]
    prompts = load("sharegpt", path=write("s.json", json.dumps(rows)))
    assert [p.id for p in prompts] == ["sharegpt/2"]
    assert "left out 2 of 3 conversations" in caplog.text


def test_a_file_of_another_set_is_refused_naming_the_columns(write: Any) -> None:
    path = write("p.jsonl", {"question": "q"}, {"problem": "p", "level": 3})
    with pytest.raises(UserError, match=r"p\.jsonl:2: .*'gsm8k'.* question; found problem, level"):
        load("gsm8k", path=path)


@pytest.mark.parametrize("error", [ConnectionError("no route\nto host"), ValueError("bad split")])
def test_a_hub_that_fails_is_one_line_with_the_way_out(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UserError, match=r"openai/gsm8k.*prompts\.path=.*HF_HOME") as caught:
        load("gsm8k")
    assert "\n" not in str(caught.value)


def test_humaneval_is_read_without_the_hub() -> None:
    prompts = load("humaneval")
    assert len(prompts) == 164
    assert prompts[0].id == "humaneval/HumanEval/0"
    assert {p.split for p in prompts} == {"test"}
    start = "Write a solution to the following problem and make sure that it passes the tests:\n"
    assert all(p.turns[0].startswith(f"{start}```python\n") for p in prompts)
    assert all(p.turns[0].endswith("\n```") for p in prompts)


def test_a_missing_package_names_the_command_that_installs_it() -> None:
    source = PackageRows(package="no_such_package_here", file="x.jsonl", install="pip install it")
    with pytest.raises(UserError, match=r"pip install it.*prompts\.path="):
        list(source.rows())


def test_a_set_needs_templates_or_turns() -> None:
    source = HubRows(repo="r", subset=None, split="train", revision=None, data_files=None)
    for templates, turns in (([], []), (["{a}"], ["turns"])):
        with pytest.raises(UserError, match="either templates or turns"):
            TabularSet(
                name="s",
                held_out=False,
                path=None,
                source=source,
                ids=[],
                templates=templates,
                turns=turns,
                max_turns=None,
            )


@needs_data
def test_the_real_files_are_read_in_the_format_of_the_field() -> None:
    test = load("gsm8k", path=DATA / "gsm8k_test.jsonl")
    assert len(test) == 1319
    assert {p.split for p in test} == {"test"}
    assert all(p.turns[0].endswith(BOXED) for p in test)
    bench = load("mt-bench", path=DATA / "eagle_mt_bench.jsonl")
    assert (len(bench), bench[0].id) == (80, "mt-bench/81")
    assert {len(p.turns) for p in bench} == {2}
    train = load("gsm8k-train", path=DATA / "gsm8k_train.jsonl")
    shares = {split: n / len(train) for split, n in Counter(p.split for p in train).items()}
    assert len(train) == 7473
    for split, share in zip(SPLITS, (0.80, 0.12, 0.04, 0.04), strict=True):
        assert shares[split] == pytest.approx(share, abs=0.015)


# --- sets of our own --------------------------------------------------------------------------


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
def test_a_set_without_a_file_layout_refuses_a_path(name: str, write: Any) -> None:
    with pytest.raises(UserError, match=f"'{name}'.*p.txt"):
        load(name, path=write("p.txt", "Hello"))


# --- several sets together --------------------------------------------------------------------


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


def test_a_copy_of_a_held_out_prompt_in_another_set_is_test(write: Any) -> None:
    question = "A baker makes 12 rolls in each of 7 trays and sells 80 of them. How many are left?"
    exam = configured("gsm8k")
    train = configured("gsm8k-train")
    file = write("q.jsonl", {"question": question})
    alone = load_prompts({"t": train}, limit=None, path=file, split=None)[0]

    class Fixed:
        def __init__(self, inner: PromptSet) -> None:
            self.name, self.held_out, self.inner = inner.name, inner.held_out, inner

        def load(self, path: Path | None = None) -> list[Prompt]:
            return self.inner.load(file)

    both = load_prompts({"e": Fixed(exam), "t": Fixed(train)}, limit=None, path=None, split=None)
    assert [p.split for p in both] == ["test", "test"]
    assert alone.hash == both[1].hash


def test_mistakes_are_told_with_what_is_allowed(write: Any) -> None:
    path = write("q.jsonl", {"question": "How many?"})
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
