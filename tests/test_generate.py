"""The generate stage: where a prompt comes from, what is streamed, what is told at the end."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
from stages_kit import CONTEXT, TINY, command, composed, entered, executed, performed

from blockpilot import generate
from blockpilot.base.errors import UserError
from blockpilot.decoding.loading import byte_tokenizer
from blockpilot.generate import Answer, open_pair

QUESTION = "Why is the sky blue?"
SETTINGS = ["dtype=float64", "decoding.temperature=1", "decoding.max_new_tokens=40"]
LAST_LINE = re.compile(r"\n\[(\d+) tokens, tau (\S+), (\S+) tokens/s(?:; cycles: .+)?\]\n$")


def arguments(folder: Path, *more: str) -> list[str]:
    paths = f"paths.outputs={folder}"
    given = [*TINY, *SETTINGS, "drafter.checkpoint=random", "policy=fixed", "run_id=run", paths]
    return [*given, *more]


def answered(folder: Path, *more: str) -> Answer:
    return performed(generate.run, "generate", *arguments(folder, *more))


class Terminal(io.StringIO):
    """Standard input that nobody has piped anything into."""

    def isatty(self) -> bool:
        return True


def test_the_three_ways_to_ask_give_the_same_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "question.txt"
    file.write_text(f"\n{QUESTION}\n", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTION}\n"))
    answers, shown = [], []
    for more in ([f'prompt="{QUESTION}"'], [f"prompt_file={file}"], []):
        answers.append(answered(tmp_path, *more))
        shown.append(capsys.readouterr().out)
    assert len({tuple(each.trace.tokens) for each in answers}) == 1
    assert shown == [answers[0].text] * 3
    assert answered(tmp_path, "prompt=other").trace.tokens != answers[0].trace.tokens


def test_what_is_streamed_is_the_text_of_the_tokens_and_the_last_line_tells_tau_and_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(4):
        answer = answered(tmp_path, f'prompt="{QUESTION}"', f"seed={seed}")
        told = capsys.readouterr()
        tokens, committed = answer.trace.tokens, answer.trace.committed
        text = byte_tokenizer().decode(tokens, skip_special_tokens=True)
        assert told.out == answer.text == text
        found = LAST_LINE.search(told.err)
        assert found
        assert int(found[1]) == len(tokens)
        assert found[2] == f"{sum(committed) / len(committed):.2f}"
        assert float(found[3]) == pytest.approx((len(tokens) - 1) / answer.trace.decode_s, 0.01)


@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_text_appears_while_it_is_committed_and_does_not_change_any_more(width: int) -> None:
    tokenizer = byte_tokenizer()
    text = "A small step, ça va très bien.\nSecond line: \u4f60\u597d \U0001f642 end"
    ids = tokenizer(text)["input_ids"]
    pieces: list[str] = []
    streamer = generate._Streamer(tokenizer, pieces.append)
    shown_after = []
    for start in range(0, len(ids), width):
        streamer.feed(ids[start : start + width])
        shown_after.append("".join(pieces))
    streamer.end()
    assert "".join(pieces) == text
    assert all(text.startswith(shown) for shown in shown_after)
    # No more than the word that is being written is held back.
    for number, shown in enumerate(shown_after):
        fed = tokenizer.decode(ids[: (number + 1) * width])
        assert len(shown) >= len(fed.rsplit(" ", 1)[0]) - 1


def test_the_text_does_not_depend_on_drafter_size_or_mode(tmp_path: Path) -> None:
    answers = [
        answered(tmp_path, "prompt=hello", *more)
        for more in (
            ["block_size=1"],
            ["block_size=5"],
            ["block_size=null"],
            ["block_size=5", "block_mode=verify"],
        )
    ]
    plain = performed(
        generate.run,
        "generate",
        *[each for each in arguments(tmp_path) if "checkpoint" not in each],
        "drafter=none",
        "prompt=hello",
    )
    assert len({tuple(each.trace.tokens) for each in [*answers, plain]}) == 1
    assert [set(each.trace.verified) for each in answers] == [{1}, {5}, {16}, {5}]
    assert [set(each.trace.drafted) for each in answers] == [{0}, {4}, {15}, {15}]
    assert plain.tau == 1


def test_a_pilot_decides_by_default_and_its_cycles_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [each for each in arguments(tmp_path, "prompt=hello") if "policy" not in each]
    answer = performed(generate.run, "generate", *given)
    assert answer.trace.tokens == answered(tmp_path, "prompt=hello").trace.tokens
    told = capsys.readouterr().err
    assert f"; cycles: {answer.cycles}]" in told
    counts = [int(part.split()[0]) for part in answer.cycles.split(", ")]
    assert sum(counts) == len(answer.trace.committed)
    with pytest.raises(UserError, match="block_size=8: it is of policy=fixed"):
        performed(generate.run, "generate", *given, "block_size=8")


def test_a_notebook_opens_the_same_pair(tmp_path: Path) -> None:
    pair = open_pair(*[each for each in arguments(tmp_path) if not each.startswith("run_id")])
    pieces: list[str] = []
    answer = pair.answer("hello", pieces.append)
    assert answer.trace.tokens == answered(tmp_path, "prompt=hello").trace.tokens
    assert "".join(pieces) == answer.text == pair.answer("hello").text
    assert answer.tau
    assert answer.tau >= 1


def test_without_a_cycle_there_is_no_tau(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for budget in (0, 1):
        answer = answered(tmp_path, "prompt=hello", f"decoding.max_new_tokens={budget}")
        assert answer.tau is None
        assert f"[{budget} tokens, tau -, - tokens/s]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed_in", "given", "told"),
    [
        ("", [], "standard input is empty; write prompt=..., prompt_file=... or pipe a text"),
        (" \n", [], "standard input is empty"),
        (None, [], "standard input is empty"),
        ("x", ["prompt=' '"], "prompt is empty"),
        ("x", ["prompt_file=empty.txt"], "prompt_file=empty.txt is empty"),
        ("x", ["prompt_file=nowhere.txt"], "prompt_file=nowhere.txt: cannot read it"),
        ("x", ["prompt_file=latin.txt"], "prompt_file=latin.txt: cannot read it"),
        ("x", ["prompt=a", "prompt_file=empty.txt"], "prompt and prompt_file are both given"),
        ("x", ["block_size=0"], "block_size=0: must be a number >= 1"),
        ("x", ["block_mode=x"], "block_mode=x: must be draft, verify"),
    ],
)
def test_a_mistake_is_one_line_before_a_weight_is_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    typed_in: str | None,
    given: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("latin.txt").write_bytes("ça".encode("latin-1"))
    monkeypatch.setattr(sys, "stdin", Terminal() if typed_in is None else io.StringIO(typed_in))
    monkeypatch.setattr(generate, "load_target", lambda cfg: pytest.fail("a weight was loaded"))
    code = entered(monkeypatch, generate.main, *arguments(tmp_path, *given))
    line = capsys.readouterr().err
    assert code == 2
    assert line.startswith(f"blockpilot.generate: error: {told}")
    assert line.count("\n") == 1


def test_a_prompt_longer_than_the_context_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"exceed the target's context of {CONTEXT}"):
        answered(tmp_path, f"prompt={'x' * CONTEXT}")


def test_a_size_that_the_drafter_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"allowed are 1\.\.16"):
        answered(tmp_path, "prompt=x", "block_size=17", "block_mode=verify")


def test_the_command_reads_a_pipe(tmp_path: Path) -> None:
    given = command("generate", *arguments(tmp_path))
    code, shown, told = executed(given, tmp_path, text=f"{QUESTION}\n")
    assert code == 0, told
    pair = generate.Pair(composed("generate", *arguments(tmp_path)))
    assert shown == pair.answer(QUESTION).text
    assert LAST_LINE.search(told)
    status = json.loads((tmp_path / "generate" / "run" / "status.json").read_text())
    assert status["status"] == "done"
