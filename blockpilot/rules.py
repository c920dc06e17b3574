"""What values a configuration may hold, checked before any weight is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date
from typing import Any

from omegaconf import OmegaConf

from blockpilot.errors import UserError

DTYPES = ("float32", "bfloat16", "float16", "float64")
ENGINES = ("eager", "compiled")
ATTENTION = ("sdpa", "eager")
BLOCK_MODES = ("draft", "verify")
MODES = ("replay", "decode")
WEIGHTS = ("pretrained", "random")
SLOT_WEIGHTS = ("decay", "dpace")
LABELS = ("argmax", "soft", "curve")
OBJECTIVES = ("tau", "throughput")
COMPILERS = ("inductor", "aot_eager", "eager")  # backends of torch.compile


@dataclass(frozen=True)
class Rule:
    """One check of one value; keys that a stage lacks and values that are null are passed over."""

    key: str
    holds: Callable[[Any], bool]
    allowed: str


def one_of(key: str, names: Iterable[str]) -> Rule:
    """Return the rule that the value of `key` is among `names`."""
    names = tuple(names)
    return Rule(key, lambda value: value in names, ", ".join(names))


def at_least(key: str, smallest: int) -> Rule:
    """Return the rule that the value of `key` is a finite number not under `smallest`."""
    allowed = f"a number >= {smallest}"
    return Rule(key, lambda value: math.isfinite(value) and value >= smallest, allowed)


def matches(key: str, pattern: str, allowed: str) -> Rule:
    """Return the rule that the whole value of `key` matches the regular expression `pattern`."""
    return Rule(key, lambda value: re.fullmatch(pattern, value) is not None, allowed)


def is_date(text: str) -> bool:
    """Whether a text is a date of ISO 8601."""
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


RULES = (
    at_least("decoding.max_new_tokens", 0),
    at_least("decoding.temperature", 0),
    at_least("decoding.top_k", 0),
    Rule("decoding.top_p", lambda value: 0 < value <= 1, "a number > 0 and <= 1"),
    at_least("block_size", 1),
    at_least("radius", 0),
    Rule("sizes", lambda sizes: all(size >= 1 for size in sizes), "a list of sizes >= 1"),
    Rule("trees", lambda sizes: all(size >= 2 for size in sizes), "a list of sizes >= 2"),
    one_of("block_mode", BLOCK_MODES),
    one_of("mode", MODES),
    at_least("replay.batch_size", 1),
    Rule("replay.memory_gb", lambda value: 0 < value < math.inf, "a number > 0"),
    Rule("contexts", lambda lengths: min(lengths, default=0) >= 1, "a list of lengths >= 1"),
    at_least("repeats", 1),
    at_least("prompts.limit", 1),
    Rule("seed", lambda value: 0 <= value < 2**32, "a whole number >= 0 and < 2**32"),
    at_least("threads", 1),
    at_least("processes", 1),
    matches("device", r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda, cuda:<index>"),
    one_of("dtype", ("auto", *DTYPES)),
    one_of("model.dtype", DTYPES),
    Rule("model.template_date", is_date, "a date as 2025-01-31"),
    one_of("attention", ATTENTION),
    one_of("engine", ENGINES),
    one_of("weights", WEIGHTS),
    at_least("responses.limit", 1),
    at_least("responses.validation", 1),
    Rule(
        "responses.self_written",
        lambda sets: all(each.count >= 1 for each in sets.values()),
        "sets with a count >= 1",
    ),
    at_least("responses.batch_size", 1),
    at_least("new_drafter.n_layers", 1),
    at_least("new_drafter.n_target_layers", 1),
    at_least("new_drafter.block_size", 2),
    at_least("new_drafter.draft_vocabulary", 1),
    at_least("training.steps", 0),
    at_least("training.sequences_per_step", 1),
    at_least("training.anchors_per_sequence", 1),
    one_of("training.slot_weights", SLOT_WEIGHTS),
    Rule("training.soft_labels", lambda share: 0 <= share <= 1, "a number from 0 to 1"),
    one_of("training.compile", COMPILERS),
    one_of("label", LABELS),
    one_of("objective", OBJECTIVES),
    Rule("sharpness", lambda value: 0 < value < math.inf, "a number > 0"),
    at_least("predictor.hidden", 1),
    at_least("predictor.depth", 0),
    Rule("predictor.dropout", lambda value: 0 <= value < 1, "a number >= 0 and < 1"),
    at_least("epochs", 1),
    at_least("patience", 1),
    at_least("batch_size", 1),
    matches("paths.outputs", r".*\S.*", "a folder"),
    matches("run_id", r"\w[\w.-]*", "letters, digits, '-', '_' and '.'"),
)


def validate(cfg: Any, rules: Iterable[Rule] = RULES) -> None:
    """Check the values of `cfg` against `rules`.

    Raises:
        UserError: naming the key, the value and what is allowed.
    """
    for rule in rules:
        value = OmegaConf.select(cfg, rule.key)
        if value is not None and not rule.holds(value):
            raise UserError(f"{rule.key}={value}: must be {rule.allowed}")
