"""Published sets: their YAML, the prompt formats of the field, hub and file as sources."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from hydra.utils import instantiate
from omegaconf import OmegaConf
from prompts_kit import BOXED, DATA, ROOT, configured, load, write

from blockpilot.base.errors import UserError
from blockpilot.base.hub import hub_in_reach, without_retries
from blockpilot.prompts.base import SPLITS
from blockpilot.prompts.hub import HubRows
from blockpilot.prompts.local import PackageRows
from blockpilot.prompts.tabular import TabularSet

CONF = sorted((ROOT / "conf" / "prompts").glob("*.yaml"))

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="shared data files are not here")


@pytest.mark.parametrize("file", CONF, ids=lambda file: file.stem)
def test_every_yaml_builds_its_set_without_a_network(file: Path) -> None:
    assert file.read_text().startswith("# @package prompts.sets\n")
    built = instantiate(OmegaConf.load(file), _convert_="all")
    assert list(built) == [file.stem] == [built[file.stem].name]


def test_all_sets_that_the_field_tests_on_are_held_out() -> None:
    held_out = {file.stem for file in CONF if configured(file.stem).held_out}
    assert held_out == {
        *("gsm8k", "math500", "aime24", "aime25", "humaneval", "mbpp", "swe-bench", "mt-bench"),
        *("livecodebench", "alpaca", "spec-bench"),
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
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    row, key, text = ROWS[name]
    calls: list[tuple[Any, ...]] = []

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return datasets.Dataset.from_list([{**row, "unread": 1}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (from_hub,) = load(name)
    (from_file,) = load(name, path=write(tmp_path / "p.jsonl", row))
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


def test_the_format_of_livecodebench_depends_on_the_starter_code(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        {"question_id": "1", "question_content": "Q", "starter_code": "class S:"},
        {"question_id": "2", "question_content": "Q", "starter_code": ""},
    )
    with_code, without = load("livecodebench", path=path)
    assert "```python\nclass S:\n```" in with_code.turns[0]
    assert "```python\n# YOUR CODE HERE\n```" in without.turns[0]


def test_optional_columns_and_nested_ones(tmp_path: Path) -> None:
    (alpaca,) = load(
        "alpaca", path=write(tmp_path / "a.jsonl", {"instruction": "Sort", "input": "b a"})
    )
    assert alpaca.turns == ("Sort\n\nInput:\nb a",)
    target = {"span1_text": "Tom", "span2_text": "he"}
    (wsc,) = load(
        "wsc", path=write(tmp_path / "w.jsonl", {"text": "T.", "target": target, "idx": 3})
    )
    assert wsc.turns == ('T. In this text, does "he" refer to "Tom"?',)


def test_both_names_of_the_turns_of_mt_bench(tmp_path: Path) -> None:
    published = write(
        tmp_path / "a.jsonl", {"question_id": 81, "category": "c", "turns": ["a", "b"]}
    )
    on_hub = write(tmp_path / "b.jsonl", {"prompt_id": 81, "category": "c", "prompt": ["a", "b"]})
    assert load("mt-bench", path=published) == load("mt-bench", path=on_hub)


def test_conversations_without_a_user_message_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"id": "a", "conversations": [{"from": "gpt", "value": "Hello"}]},
        {"id": "b", "conversations": []},
        {"id": "c", "conversations": [{"from": "human", "value": "Hi"}]},
    ]
    prompts = load("sharegpt", path=write(tmp_path / "s.json", json.dumps(rows)))
    assert [p.id for p in prompts] == ["sharegpt/2"]
    assert "left out 2 of 3 conversations" in caplog.text


def test_a_file_of_another_set_is_refused_naming_the_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"question": "q"}, {"problem": "p", "level": 3})
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


def test_a_hub_out_of_reach_is_asked_and_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its client would try each file six times and wait half a minute in between."""
    asked: list[str] = []

    class Session:
        def head(self, url: str, timeout: float) -> None:
            asked.append(url)
            raise OSError("no route\nto host")

    monkeypatch.setattr("blockpilot.base.hub.get_session", Session)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub_in_reach.cache_clear()
    for _ in range(2):
        with without_retries("some/repo"):
            assert constants.HF_HUB_OFFLINE
        assert not constants.HF_HUB_OFFLINE
        with without_retries(tmp_path):
            assert not constants.HF_HUB_OFFLINE
    hub_in_reach.cache_clear()
    assert asked == [constants.ENDPOINT]
    (told,) = caplog.records
    assert "no route" in told.message
    assert "\n" not in told.message


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


def test_spec_bench_has_a_set_for_each_task_and_all_of_it_is_test(tmp_path: Path) -> None:
    def line(number: int, category: str, *turns: str) -> dict[str, Any]:
        return {"question_id": number, "category": category, "turns": list(turns)}

    file = write(
        tmp_path / "question.jsonl",
        line(81, "writing", "Write.", "Again."),
        line(121, "coding", "Code."),
        line(161, "translation", "Guten Tag"),
        line(162, "translation", "Gute Nacht"),
        line(401, "rag", "Who?"),
    )
    prompts = load("spec-bench", path=file)
    assert [prompt.id for prompt in prompts] == [
        "spec-bench-conversation/81",
        "spec-bench-conversation/121",
        "spec-bench-translation/161",
        "spec-bench-translation/162",
        "spec-bench-retrieval/401",
    ]
    assert prompts[0].turns == ("Write.", "Again.")
    assert {prompt.split for prompt in prompts} == {"test"}
    assert [prompt.set for prompt in load("spec-bench", path=file, limit=1)] == [
        *("spec-bench-conversation", "spec-bench-translation", "spec-bench-retrieval")
    ]
    write(file, line(1, "poetry", "Rhyme."))
    with pytest.raises(UserError, match=r"jsonl:1: category=poetry, allowed are writing"):
        load("spec-bench", path=file)
    write(file, {"question": "1+1?"})
    with pytest.raises(UserError, match="layout of Spec-Bench, which has question_id"):
        load("spec-bench", path=file)
    with pytest.raises(UserError, match=r"question\.jsonl: give it with prompts\.path"):
        load("spec-bench")


@needs_data
def test_half_of_spec_bench_is_read_task_by_task() -> None:
    found = Counter(
        prompt.set for prompt in load("spec-bench", path=DATA / "spec_bench_even.jsonl")
    )
    assert set(found.values()) == {40}
    assert len(found) == 6


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
