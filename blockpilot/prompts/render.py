"""From messages to the token ids that the target is prefilled with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from blockpilot.base.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    thinking: bool | None,
    date: str,
) -> list[int]:
    """Token ids of a conversation up to where the assistant's next message begins.

    Args:
        tokenizer: the target's; without a chat template the messages are joined as plain text.
        messages: {role, content} records, the user's message last.
        thinking: for templates with an `enable_thinking` switch; None leaves their default.
        date: what a template is told that asks for today's, in ISO 8601. The clock's own would
            give other prompts on another day.

    Raises:
        UserError: thinking asked of a template without the switch, a template that refuses the
            messages or whose two routes to ids disagree, or a conversation without tokens.
    """
    if tokenizer.chat_template is None:
        if thinking:
            raise UserError("thinking=true, but the model has no chat template; set it to null")
        text = "\n\n".join(message["content"] for message in messages)
        ids = list(tokenizer(text)["input_ids"])
    else:
        ids = _from_template(tokenizer, [dict(message) for message in messages], thinking, date)
    ids = _with_one_bos(ids, tokenizer.bos_token_id)
    if not ids:
        raise UserError("the conversation has no tokens, so there is nothing to continue")
    return ids


def _from_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    thinking: bool | None,
    date: str,
) -> list[int]:
    switch: dict[str, Any] = {}
    template = tokenizer.get_chat_template()
    if "strftime_now" in template:
        template = _dated(date) + template
    if "enable_thinking" in template:
        switch = {} if thinking is None else {"enable_thinking": thinking}
    elif thinking:
        raise UserError("thinking=true, but the model's chat template has no switch for it")

    def apply(tokenize: bool) -> Any:
        return tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=tokenize,
            return_dict=False,
            chat_template=template,
            **switch,
        )

    try:
        direct = list(apply(tokenize=True))
        by_text = list(tokenizer(apply(tokenize=False), add_special_tokens=False)["input_ids"])
    except TemplateError as error:
        raise UserError(f"the model's chat template refuses the messages: {error}") from error
    if direct != by_text:
        place = next(
            (i for i, (a, b) in enumerate(zip(direct, by_text, strict=False)) if a != b),
            min(len(direct), len(by_text)),
        )
        raise UserError(
            f"the tokenizer's chat template gives other ids by text than directly, from token"
            f" {place} on; acceptance lengths would depend on the route"
        )
    return direct


def _dated(date: str) -> str:
    """A macro that stands before the function of its name, which would ask the clock.

    transformers hands no functions to a template, so what a format means is told in Jinja.
    """
    day = datetime.fromisoformat(date)
    replaced = "".join(
        f".replace({'%' + code!r}, {day.strftime('%' + code)!r})"
        for code in (*"aAbBcdHIjmMpSUwWxXyYe", "-d", "-m")
    )
    return "{%- macro strftime_now(format) -%}{{ format" + replaced + " }}{%- endmacro -%}"


def _with_one_bos(ids: list[int], bos: int | None) -> list[int]:
    """Drops repeated BOS at the start (a template and a tokenizer can each add one)."""
    while len(ids) > 1 and ids[0] == ids[1] == bos:
        ids = ids[1:]
    return ids
