"""Local files: layouts known by their keys, kinds of files, and bad input."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from prompts_kit import load, write

from blockpilot.base.errors import UserError
from blockpilot.prompts.base import UNASSIGNED, Prompt
from blockpilot.prompts.local import LocalSet

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
def test_published_layouts_are_known_by_their_keys(layout: str, tmp_path: Path) -> None:
    row, key, turns = LAYOUTS[layout]
    (prompt,) = LocalSet(name="s", held_out=False, path=write(tmp_path / "p.jsonl", row)).load()
    assert prompt == Prompt(f"s/{key}", "s", turns, UNASSIGNED)


def test_a_system_message_is_kept(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}]
    (prompt,) = load("local", path=write(tmp_path / "p.jsonl", {"messages": messages}))
    assert (prompt.system, prompt.turns) == ("Be brief.", ("q",))


def test_all_kinds_of_files_give_the_same_prompts(tmp_path: Path) -> None:
    import pandas as pd

    rows = [{"prompt": "first, with a comma"}, {"prompt": "zweite: ä 日本"}]
    paths = [
        write(tmp_path / "a.jsonl", rows[0], "", rows[1]),
        write(tmp_path / "b.json", json.dumps(rows, indent=1)),
        write(tmp_path / "c.txt", rows[0]["prompt"], "   ", rows[1]["prompt"]),
        write(tmp_path / "d.csv", "prompt", '"first, with a comma"', rows[1]["prompt"]),
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


def test_a_line_separator_inside_a_text_does_not_split_the_row(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl", json.dumps({"prompt": "a\u2028b\u0085c"}, ensure_ascii=False)
    )
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
