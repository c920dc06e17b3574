"""From messages to ids: both routes of a template, thinking mode, BOS."""

from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from blockpilot.base.errors import UserError
from blockpilot.prompts.render import render

DATE = "2025-01-01"
WORDS = ["[UNK]", "<bos>", "<user>", "<bot>", "<think>", "hello", "there", "again"]
ID = {word: i for i, word in enumerate(WORDS)}
MESSAGES = [{"role": "user", "content": "hello there"}]
BODY = (
    "{% for m in messages %}{{ '<user> ' if m.role == 'user' else '<bot> ' }}"
    "{{ m.content }} {% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
SWITCH = "{% if enable_thinking is not defined or enable_thinking %} <think>{% endif %}"


def tokenizer(template: str | None, *, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    core = Tokenizer(WordLevel(ID, unk_token="[UNK]"))
    core.pre_tokenizer = Whitespace()
    core.add_special_tokens(["<bos>", "<user>", "<bot>", "<think>"])
    if adds_bos:
        core.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", ID["<bos>"])]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", unk_token="[UNK]")
    made.chat_template = template
    return made


def ids(text: str) -> list[int]:
    return [ID[word] for word in text.split()]


def test_the_two_routes_of_a_template_give_equal_ids() -> None:
    made = tokenizer("<bos> " + BODY)
    text = made.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert made(text)["input_ids"][:2] == ids("<bos> <bos>")  # the trap: adding it twice
    rendered = render(made, MESSAGES, None, DATE)
    assert rendered == ids("<bos> <user> hello there <bot>")
    assert rendered == made(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("start", ["", "<bos> ", "<bos> <bos> ", "<bos> <bos> <bos> "])
def test_there_is_at_most_one_bos(start: str) -> None:
    rendered = render(tokenizer(start + BODY), MESSAGES, None, DATE)
    assert rendered == ids(("<bos> " if start else "") + "<user> hello there <bot>")


def test_a_bos_that_also_opens_messages_is_left_alone() -> None:
    """ChatML models use one token as BOS and as the start of every message."""
    chat = [*MESSAGES, {"role": "assistant", "content": "hello"}, *MESSAGES]
    template = "{% for m in messages %}<bos> {{ m.content }} {% endfor %}<bos>"
    rendered = render(tokenizer(template), chat, None, DATE)
    assert rendered == ids("<bos> hello there <bos> hello <bos> hello there <bos>")


def test_disagreeing_routes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tokenizer(BODY)
    original = made.apply_chat_template

    def crooked(*args: Any, tokenize: bool, **kwargs: Any) -> Any:
        given = original(*args, tokenize=tokenize, **kwargs)
        return [*given, ID["again"]] if tokenize else given

    monkeypatch.setattr(made, "apply_chat_template", crooked)
    with pytest.raises(UserError, match="from token 4 on"):
        render(made, MESSAGES, None, DATE)


def test_thinking_reaches_templates_that_have_the_switch_and_no_others() -> None:
    switch, plain = tokenizer(BODY + SWITCH), tokenizer(BODY)
    base = ids("<user> hello there <bot>")
    assert render(switch, MESSAGES, True, DATE) == [*base, ID["<think>"]]
    assert render(switch, MESSAGES, None, DATE) == [*base, ID["<think>"]]
    assert render(switch, MESSAGES, False, DATE) == base
    assert render(plain, MESSAGES, False, DATE) == base
    for without in (plain, tokenizer(None)):
        with pytest.raises(UserError, match="thinking=true"):
            render(without, MESSAGES, True, DATE)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_base_model_gets_plain_text_with_its_own_bos(adds_bos: bool) -> None:
    chat = [*MESSAGES, {"role": "assistant", "content": "again"}]
    rendered = render(tokenizer(None, adds_bos=adds_bos), chat, None, DATE)
    assert rendered == ids(("<bos> " if adds_bos else "") + "hello there again")


def test_a_template_that_refuses_the_messages_is_told_in_one_line() -> None:
    made = tokenizer("{{ raise_exception('System role is not supported') }}")
    with pytest.raises(UserError, match="System role is not supported"):
        render(made, MESSAGES, None, DATE)


def test_a_conversation_without_tokens_is_refused() -> None:
    with pytest.raises(UserError, match="no tokens"):
        render(tokenizer(None, adds_bos=False), [{"role": "user", "content": " "}], None, DATE)


@pytest.mark.parametrize(
    "asks",
    [
        "{{ strftime_now('%d %b %Y') }}",
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}"
        "{% endif %}{{ date_string }}",
    ],
)
def test_a_template_that_asks_for_the_date_is_told_the_one_given(asks: str) -> None:
    """Not the clock's: the same conversation has the same tokens on every day."""
    words = ["[UNK]", "01", "02", "Jan", "2025"]
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]")
    made.chat_template = asks
    assert render(made, MESSAGES, None, "2025-01-01") == [1, 3, 4]
    assert render(made, MESSAGES, None, "2025-01-02") == [2, 3, 4]
