"""The record: one row per (prompt, turn, method), its columns, keys and builders.

Status values
    ok       decoded to a stop token or the budget; every measured column is filled
    skipped  cannot run at all (longer than the context, undecodable); `skip_reason` says why;
             counts as done
    failed   an exception; `error` holds it; tried again by the next run
A skipped or failed row has no measured values and empty lists. A prompt that cannot run has one
such row per method, so that completeness is the same question for all rows.

Keys
    key        hash of all `Settings`: the same key means the same measurement
    group_key  hash of the settings that all methods of a prompt share (everything but turn
               and the method's own fields). Rows of one group are what a speedup may join, and
               only within one session.

`prompt_sha256` and `output_sha256` are over the token ids of the prompt (earlier turns included)
and of what is new, as little-endian int32. `divergence_at` is the first new
token that is not plain decoding's and `divergence_margin` the gap of the two tokens' scores there;
both are empty for equal outputs. Of each cycle `drafted` counts the drafter's tokens, `verified`
target positions, `copied` those that were copied from the text, `quoted` and `repeated` the
accepted copies, from the prompt and from the answer itself; `cycle_s` are its seconds where the
policy reads them, else it is empty. `drafter_update` is after which update of its weights a drafter
that learns decoded, 0 before the first; it is empty for others. Rows of mode
`replay` have no measured times; `predicted_decode_s` comes from a cost curve where one was given.
Their output is one answer per prompt, the same for all methods.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

SCHEMA_VERSION = 6
PLAIN = "plain"  # the method that speedups and equality are measured against

_INTS = pa.list_(pa.int32())


def _column(name: str, kind: pa.DataType, *, null: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=null)


SCHEMA = pa.schema(
    [
        _column("schema_version", pa.int32()),
        _column("key", pa.string()),
        _column("group_key", pa.string()),
        # who and where
        _column("run_id", pa.string()),
        _column("session_id", pa.string()),
        _column("host", pa.string()),
        _column("rank", pa.int32()),
        _column("world_size", pa.int32()),
        _column("cpu", pa.string()),
        _column("gpu", pa.string(), null=True),
        _column("threads", pa.int32()),
        _column("versions", pa.string()),  # JSON
        # which prompt
        _column("prompt_id", pa.string()),
        _column("prompt_hash", pa.string()),
        _column("prompt_set", pa.string()),
        _column("split", pa.string()),
        _column("turn", pa.int32()),
        # which method
        _column("method", pa.string()),
        _column("drafter", pa.string()),
        _column("drafter_checkpoint", pa.string(), null=True),
        _column("policy", pa.string()),
        _column("trained_block_size", pa.int32(), null=True),
        _column("block_size", pa.int32()),
        _column("block_mode", pa.string()),
        # settings shared by the methods
        _column("target", pa.string()),
        _column("target_revision", pa.string(), null=True),
        _column("target_fingerprint", pa.string()),
        _column("tokenizer", pa.string()),  # its fingerprint, chat template included
        _column("weights", pa.string()),
        _column("temperature", pa.float64()),
        _column("top_k", pa.int32(), null=True),
        _column("top_p", pa.float64(), null=True),
        _column("seed", pa.int64()),
        _column("dtype", pa.string()),
        _column("attention", pa.string()),
        _column("engine", pa.string()),
        _column("device", pa.string()),
        _column("thinking", pa.bool_(), null=True),
        _column("template_date", pa.string()),
        _column("max_new_tokens", pa.int32()),
        _column("mode", pa.string()),
        # what happened
        _column("status", pa.string()),
        _column("skip_reason", pa.string(), null=True),
        _column("error", pa.string(), null=True),
        _column("stop_reason", pa.string(), null=True),
        _column("n_prompt_tokens", pa.int32(), null=True),
        _column("prompt_sha256", pa.string(), null=True),
        _column("n_new_tokens", pa.int32()),
        _column("output_sha256", pa.string(), null=True),
        _column("divergence_at", pa.int32(), null=True),
        _column("divergence_margin", pa.float64(), null=True),
        _column("committed", _INTS),
        _column("drafted", _INTS),
        _column("verified", _INTS),
        _column("copied", _INTS),
        _column("quoted", _INTS),
        _column("repeated", _INTS),
        _column("prefill_s", pa.float64(), null=True),
        _column("decode_s", pa.float64(), null=True),
        _column("draft_s", pa.float64(), null=True),
        _column("verify_s", pa.float64(), null=True),
        _column("policy_s", pa.float64(), null=True),
        _column("other_s", pa.float64(), null=True),
        _column("predicted_decode_s", pa.float64(), null=True),
        _column("cycle_s", pa.list_(pa.float64()), null=True),
        _column("drafter_update", pa.int32(), null=True),
    ],
    metadata={"blockpilot_schema_version": str(SCHEMA_VERSION)},
)

METHOD_FIELDS = (
    "method",
    "drafter",
    "drafter_checkpoint",
    "policy",
    "trained_block_size",
    "block_size",
    "block_mode",
)
SHARED_FIELDS = (
    "target",
    "target_revision",
    "weights",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "dtype",
    "attention",
    "engine",
    "device",
    "thinking",
    "template_date",
    "max_new_tokens",
    "mode",
    # After what explains them: the dtype changes the weights that are loaded.
    "target_fingerprint",
    "tokenizer",
)
_ALLOWED = {
    "block_mode": ("draft", "verify"),
    "mode": ("decode", "replay"),
}
PER_CYCLE = ("committed", "drafted", "verified", "copied", "quoted", "repeated")
TIMES = ("prefill_s", "decode_s", "draft_s", "verify_s", "policy_s", "other_s")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that defines a row, and nothing that only describes a run of it.

    `drafter_checkpoint` names the weights well enough that retrained ones differ, and `policy` what
    it learnt or measured: `blockpilot@<digest>`. Plain decoding
    has drafter `none`, block size 1 and the run's block mode, which has no effect on it. The seed
    belongs to the sampler. Values are normalised to the column types; a value that does not fit
    raises ValueError naming the field.
    """

    prompt_id: str
    prompt_hash: str
    prompt_set: str
    split: str
    turn: int
    method: str
    drafter: str
    drafter_checkpoint: str | None
    policy: str
    trained_block_size: int | None
    block_size: int
    block_mode: str
    target: str
    target_revision: str | None
    target_fingerprint: str
    tokenizer: str
    weights: str
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int
    dtype: str
    attention: str
    engine: str
    device: str
    thinking: bool | None
    template_date: str
    max_new_tokens: int
    mode: str

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = _normalised(entry.name, getattr(self, entry.name))
            object.__setattr__(self, entry.name, value)


class Outcome(Protocol):
    """What a row needs to know of a decoded prompt (`blockpilot.decoding.types.Trace`)."""

    tokens: list[int]
    committed: list[int]
    drafted: list[int]
    verified: list[int]
    copied: list[int]
    quoted: list[int]
    repeated: list[int]
    stop_reason: str
    prefill_s: float
    decode_s: float
    draft_s: float
    verify_s: float
    policy_s: float
    other_s: float
    cycle_s: list[float] | None


def row_key(settings: Settings) -> str:
    """Hash of all settings: hex, 128 bits."""
    return _hash(asdict(settings))


def group_key(settings: Settings) -> str:
    """Hash of the prompt and the settings that all its methods share: hex, 128 bits."""
    names = ("prompt_id", "prompt_hash", *SHARED_FIELDS)
    return _hash({name: getattr(settings, name) for name in names})


def ok_row(settings: Settings, trace: Outcome, *, prompt_ids: Sequence[int]) -> dict[str, Any]:
    """Row of a decoded prompt.

    Raises ValueError when the counts break `sum(committed) + 1 == len(tokens)`: such a row would
    make every tau wrong, so it is never stored.
    """
    n_tokens, n_committed = len(trace.tokens), sum(trace.committed)
    if n_tokens != (n_committed + 1 if trace.committed or n_tokens else 0):
        raise ValueError(
            f"{settings.prompt_id}: {n_tokens} new tokens but {n_committed} committed in cycles"
        )
    if len({len(getattr(trace, name)) for name in PER_CYCLE}) > 1:
        raise ValueError(f"{settings.prompt_id}: per-cycle lists differ in length")
    row = _row(settings, "ok")
    row["stop_reason"] = trace.stop_reason
    row["n_prompt_tokens"] = len(prompt_ids)
    row["prompt_sha256"] = token_hash(prompt_ids)
    row["n_new_tokens"] = n_tokens
    row["output_sha256"] = token_hash(trace.tokens)
    for name in PER_CYCLE:
        row[name] = [int(count) for count in getattr(trace, name)]
    if settings.mode == "decode":
        row.update({name: float(getattr(trace, name)) for name in TIMES})
        row["cycle_s"] = trace.cycle_s
    return row


def skipped_row(
    settings: Settings, reason: str, *, n_prompt_tokens: int | None = None
) -> dict[str, Any]:
    """Row of a prompt that cannot run; counts as done."""
    return _row(settings, "skipped") | {
        "skip_reason": clean(reason),
        "n_prompt_tokens": n_prompt_tokens,
    }


def failed_row(
    settings: Settings, error: BaseException | str, *, n_prompt_tokens: int | None = None
) -> dict[str, Any]:
    """Row of a prompt that raised `error`; the next run tries it again."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return _row(settings, "failed") | {"error": clean(text), "n_prompt_tokens": n_prompt_tokens}


def token_hash(tokens: Sequence[int]) -> str:
    """sha256 hex over the token ids as little-endian int32."""
    return hashlib.sha256(np.asarray(tokens, dtype="<i4").tobytes()).hexdigest()


def clean(text: str) -> str:
    """`text` with characters that UTF-8 cannot hold (lone surrogates) written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _row(settings: Settings, status: str) -> dict[str, Any]:
    empty: dict[str, Any] = {name: [] for name in PER_CYCLE} | {"n_new_tokens": 0}
    keys = {"key": row_key(settings), "group_key": group_key(settings)}
    return asdict(settings) | keys | {"status": status} | empty


def _normalised(name: str, value: Any) -> Any:
    column = SCHEMA.field(name)
    if isinstance(value, str):
        value = clean(value)
    if value is None and not column.nullable:
        raise ValueError(f"record field {name} must not be empty")
    if name in _ALLOWED and value not in _ALLOWED[name]:
        raise ValueError(f"record field {name} is {value!r}; allowed: {', '.join(_ALLOWED[name])}")
    try:
        plain = pa.scalar(value, type=column.type).as_py()
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError) as error:
        raise ValueError(f"record field {name}: {value!r} is no {column.type}") from error
    # -0.0 is the same temperature as 0.0 and must hash alike.
    return plain + 0.0 if isinstance(plain, float) else plain


def _hash(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
