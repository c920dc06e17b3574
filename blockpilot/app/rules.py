"""What values a configuration may hold, checked before any weight is loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from omegaconf import DictConfig, OmegaConf

from blockpilot.base.devices import DTYPES
from blockpilot.base.errors import UserError
from blockpilot.decoding.engines import ENGINES
from blockpilot.decoding.types import BLOCK_MODES

ATTENTION = ("sdpa", "eager")
MODES = ("replay", "decode")
WEIGHTS = ("pretrained", "random")
LABELS = ("argmax", "soft", "curve")
OBJECTIVES = ("tau", "throughput")
PATH_HEADS = ("selector", "markov")
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


def number(key: str, low: float, high: float, *, above: bool = False) -> Rule:
    """Return the rule that the value of `key`, or every one of a list, is in a range.

    The range is low <= value <= high; with `above` it is low < value <= high.
    """

    def holds(value: Any) -> bool:
        values = value if isinstance(value, Sequence) else [value]
        return all(low < each <= high or (each == low and not above) for each in values)

    return Rule(key, holds, f"a number {'>' if above else '>='} {low} and <= {high}")


def whole(key: str, low: int, high: int) -> Rule:
    """Return the rule that the value of a component's `key`, which has no type, is a whole number
    in a range."""
    return Rule(
        key,
        lambda value: type(value) is int and low <= value <= high,
        f"a whole number >= {low} and <= {high}",
    )


def sizes(key: str, low: int, high: int) -> Rule:
    """Return the rule that every value of the list `key` is in a range."""
    return Rule(key, number(key, low, high).holds, f"a list of sizes >= {low} and <= {high}")


def matches(key: str, pattern: str, allowed: str) -> Rule:
    """Return the rule that the whole value of `key` matches the regular expression `pattern`."""
    return Rule(key, lambda value: re.fullmatch(pattern, value) is not None, allowed)


def is_date(text: str) -> bool:
    """Whether a text is a date of ISO 8601."""
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


_TOKENS = 1_000_000  # more than any context
_BLOCK = 1024  # slots of a block, positions of a tree
_BATCH = 65_536  # examples or sequences in memory together
_COUNT = 10**9  # a 32-bit column of the records holds it

RULES = (
    number("decoding.max_new_tokens", 0, _TOKENS),
    number("decoding.temperature", 0, 100),
    number("decoding.top_k", 0, _TOKENS),
    number("decoding.top_p", 0, 1, above=True),
    number("block_size", 1, _BLOCK),
    number("radius", 0, _BLOCK),
    sizes("sizes", 1, _BLOCK),
    sizes("trees", 2, _BLOCK),
    sizes("copies", 2, _BLOCK),
    sizes("tree_nodes", 1, _BLOCK),
    sizes("batch", 1, _BATCH),
    one_of("block_mode", BLOCK_MODES),
    one_of("mode", MODES),
    number("replay.batch_size", 1, _BATCH),
    number("replay.memory_gb", 0, 100_000, above=True),
    Rule(
        "contexts",
        lambda lengths: len(lengths) > 0 and number("", 1, _TOKENS).holds(lengths),
        f"a list of lengths >= 1 and <= {_TOKENS}, not empty",
    ),
    number("repeats", 1, 10_000),
    number("prompts.limit", 1, _COUNT),
    Rule("seed", lambda value: 0 <= value < 2**32, "a whole number >= 0 and < 2**32"),
    number("threads", 1, 1024),
    number("processes", 1, 1024),
    number("records.timed", 1, _COUNT),
    number("records.temperature", 0, 100),
    number("records.seeds", 0, 2**32 - 1),
    matches("device", r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda, cuda:<index>"),
    one_of("dtype", ("auto", *DTYPES)),
    one_of("model.dtype", DTYPES),
    Rule("model.template_date", is_date, "a date as 2025-01-31"),
    one_of("attention", ("auto", *ATTENTION)),
    one_of("model.attention", ATTENTION),
    one_of("engine", ENGINES),
    one_of("weights", WEIGHTS),
    one_of("export", ("speculators",)),
    number("responses.limit", 1, _COUNT),
    Rule(
        "responses.limit_of",
        lambda limits: number("", 0, _COUNT).holds(list(limits.values())),
        f"sets with a limit >= 0 and <= {_COUNT}",
    ),
    number("responses.validation", 1, _COUNT),
    Rule(
        "responses.self_written",
        lambda sets: number("", 1, _COUNT).holds([each.count for each in sets.values()]),
        f"sets with a count >= 1 and <= {_COUNT}",
    ),
    number("responses.batch_size", 1, _BATCH),
    number("new_drafter.block_size", 2, _BLOCK),
    number("training.steps", 0, _COUNT),
    number("training.sequences_per_step", 1, _BATCH),
    number("training.anchors_per_sequence", 1, _BATCH),
    number("training.learning_rate", 0, 10, above=True),
    number("training.weight_decay", 0, 10),
    number("training.warmup", 0, 1),
    number("training.clip", 0, _COUNT, above=True),
    one_of("training.compile", COMPILERS),
    number("training.log_every", 1, _COUNT),
    number("training.evaluate_every", 1, _COUNT),
    one_of("label", LABELS),
    one_of("objective", OBJECTIVES),
    number("sharpness", 0, _COUNT, above=True),
    number("predictor.hidden", 1, _BATCH),
    number("predictor.depth", 0, 1000),
    Rule("predictor.dropout", lambda value: 0 <= value < 1, "a number >= 0 and < 1"),
    number("epochs", 1, _COUNT),
    number("patience", 1, _COUNT),
    number("batch_size", 1, _BATCH),
    number("learning_rate", 0, 10, above=True),
    matches("paths.outputs", r".*\S.*", "a folder"),
    matches("run_id", r"\w[\w.-]*", "letters, digits, '-', '_' and '.'"),
)

COMPONENT_RULES = (
    whole("adapt", 1, _COUNT),
    number("alpha", 0, 1000, above=True),
    number("alternatives", 0, _BLOCK),
    number("block_size", 1, _BLOCK),
    number("blocks", 1, _BLOCK),
    number("depth", 0, _BLOCK),
    whole("draft_vocabulary", 1, _COUNT),
    number("examples", 0, _COUNT),
    number("gamma", 0, _COUNT, above=True),
    one_of("kind", PATH_HEADS),
    whole("mask_token_id", 0, _COUNT),
    number("max_ngram", 1, _TOKENS),
    number("max_turns", 1, _COUNT),
    whole("n_layers", 1, 1000),
    whole("n_target_layers", 1, 1000),
    whole("length", 1, _BLOCK),
    whole("longest_copy", 0, _BLOCK),
    whole("min_match", 1, _TOKENS),
    number("nodes", 1, _BLOCK),
    whole("rank", 1, _BLOCK),
    whole("sampled_negatives", 1, _COUNT),
    number("soft_labels", 0, 1),
    number("token_penalty", 0, _COUNT),
    number("top_k", 1, _BLOCK),
    *(
        Rule(key, lambda value: isinstance(value, str), "text")
        for key in ("checkpoint", "path", "cost")
    ),
)
"""Values that constructors of components take; some allow still fewer themselves."""


def validate(cfg: Any, rules: Iterable[Rule] = RULES) -> None:
    """Check the values of `cfg` against `rules`, those of its components against their own.

    Raises:
        UserError: naming the key, the value and what is allowed.
    """
    _check(cfg, rules, "")
    for path, node in _components(cfg, ""):
        _check(node, COMPONENT_RULES, path)


def _check(cfg: Any, rules: Iterable[Rule], path: str) -> None:
    for rule in rules:
        value: Any = OmegaConf.select(cfg, rule.key)
        try:
            fits = value is None or rule.holds(value)
        except TypeError:  # a component's keys have no type that would have been checked before
            fits = False
        if not fits:
            raise UserError(f"{path}{rule.key}={value}: must be {rule.allowed}")


def _components(node: Any, path: str) -> Iterator[tuple[str, DictConfig]]:
    """Nodes that name a class, anywhere in a configuration, with the dotted path to their keys."""
    if not isinstance(node, DictConfig) or node._is_none():
        return
    if "_target_" in node:
        yield path, node
    for key in map(str, node):
        yield from _components(node._get_node(key), f"{path}{key}.")
