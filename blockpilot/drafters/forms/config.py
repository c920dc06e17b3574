"""The config.json of a published drafter, read whole: a key is used, without effect, or refused.

A key that is read past may stand for something that the network does not do; the tensors would load
all the same and the drafts be quietly worse.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NoReturn

from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from blockpilot.base.errors import UserError

GROUPS = ("dflash_config", "draft_config", "eagle_config", "rope_parameters", "rope_scaling")
"""Keys whose values are keys again, named with a dot: `dflash_config.block_size`."""

ANY_VALUE = {
    "_name_or_path": "where the file came from",
    "transformers_version": "who wrote the file",
    "auto_map": "code of the repository, which is never run",
    "dtype": "weights carry their own, and the network takes the target's",
    "torch_dtype": "the old name of dtype",
    "bos_token_id": "text begins and ends as the target says",
    "eos_token_id": "text begins and ends as the target says",
    "pad_token_id": "nothing is padded",
    "attention_dropout": "of training",
    "initializer_range": "of training",
    "use_cache": "the cache is this project's own",
    "max_window_layers": "read only where a window slides, which is refused by other keys",
    "tie_word_embeddings": "head and embedding are tensors of the file, else the target's",
}
"""Keys without effect at any value, each with the reason."""

# What each kind of rotary embedding reads beside rope_theta. Others are not built: the angles of
# dynamic and longrope depend on how long the text is, so they would have to be computed anew.
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
_ROPE_NEEDED = ("factor", "low_freq_factor", "high_freq_factor")

# Keys that say most about what a file is: told before others.
_TELLING = (
    "speculators_model_type",
    "architectures",
    "model_type",
    "projector_type",
    "rope_type",
    "type",
    "layer_types",
    "causal_head",
)
_TEXT = 80  # characters of a value in a message


class ConfigReader:
    """Keys are taken one by one; `refuse_unread` refuses what was neither taken nor harmless.

    A null counts as absent where a key is known. `ignored` are keys that the user takes the risk
    of: they are left out as if the file did not hold them. Raises UserError for one it does not.
    """

    def __init__(self, raw: Mapping[str, Any], where: str, ignored: Sequence[str] = ()) -> None:
        self.where = where
        self._left: dict[str, Any] = {}
        for key, value in raw.items():
            if key in GROUPS and isinstance(value, Mapping):
                self._left |= {f"{key}.{inner}": each for inner, each in value.items()}
            elif key not in GROUPS or value is not None:
                self._left[key] = value
        self._wrong: dict[str, tuple[Any, str]] = {}
        if isinstance(ignored, str) or not isinstance(ignored, Sequence):
            raise UserError(f"drafter.ignore_keys={ignored}: allowed is a list of keys")
        for key in ignored:
            if key not in self._left:
                there = ", ".join(sorted(self._left)) or "none"
                self.refuse(f"config.json has no key {key} (drafter.ignore_keys); it has {there}")
        self._left = {key: value for key, value in self._left.items() if key not in ignored}

    def refuse(self, message: str) -> NoReturn:
        """Raise UserError for this drafter."""
        raise UserError(f"drafter {self.where}: {message}")

    def take(self, *keys: str) -> Any:
        """The value of one key under any of its names, None where there is none.

        Raises UserError when the names disagree.
        """
        found = {key: self._left.pop(key) for key in keys if key in self._left}
        given = [(key, value) for key, value in found.items() if value is not None]
        for key, value in given[1:]:
            if value != given[0][1]:
                self.refuse(
                    f"config.json says {_told(*given[0])}, but {_told(key, value)}: make them agree"
                )
        return given[0][1] if given else None

    def peek(self, key: str) -> Any:
        """The value of a key that is still to be taken, None where there is none."""
        return self._left.get(key)

    def expect(self, keys: str | Iterable[str], *allowed: Any) -> None:
        """Keys at the values that the network stands for; others are told by `refuse_unread`."""
        for key in (keys,) if isinstance(keys, str) else keys:
            value = self._left.pop(key, None)
            if value is not None and value not in allowed:
                built = " or ".join(str(each) for each in allowed) or "null"
                self._wrong[key] = value, f"allowed is {built}"

    def rope(self) -> dict[str, Any]:
        """`rope_parameters` in the form of transformers 5, of whichever form the file has."""

        def names(key: str) -> tuple[str, ...]:
            return f"rope_parameters.{key}", f"rope_scaling.{key}"

        self.expect((*names("partial_rotary_factor"), "partial_rotary_factor"), 1)
        kinds = (*names("rope_type"), *names("type"))
        known = [key for key in kinds if self._left.get(key) in (None, *ROPE_KEYS)]
        kind = self.take(*known) or "default"
        self.expect(kinds, *ROPE_KEYS)
        found = {"rope_type": kind, "rope_theta": self.take("rope_theta", *names("rope_theta"))}
        for key in ROPE_KEYS[kind]:
            top = ("original_max_position_embeddings",) if key.startswith("original") else ()
            found[key] = self.take(*names(key), *top)
        return {key: value for key, value in found.items() if value is not None}

    def refuse_unread(self) -> None:
        """Raise UserError naming what is left and what stands at a value that is not built."""
        plain = _plain()
        for key, value in self._left.items():
            if key in ANY_VALUE or (key in plain and value == plain[key]):
                continue
            known = f"allowed is {plain[key]}" if key in plain else "which is not known here"
            self._wrong[key] = value, known
        if not self._wrong:
            return
        order = {name: place for place, name in enumerate(_TELLING)}
        wrong = sorted(self._wrong, key=lambda key: order.get(key.split(".")[-1], len(order)))
        value, allowed = self._wrong[wrong[0]]
        more = f" (also not built: {', '.join(wrong[1:])})" if wrong[1:] else ""
        self.refuse(
            f"config.json says {_told(wrong[0], value)}, {allowed}{more}; remove it, or "
            f"take the risk with drafter.ignore_keys=[{','.join(wrong)}]"
        )

    def whole(self, values: Mapping[str, Any], keys: Iterable[str], least: int | None) -> None:
        """Refuse values of `keys` that are missing or no integers, of at least `least` if given."""
        for key in keys:
            value = values.get(key)
            if value is None:
                self.refuse(f"config.json lacks the key {key}")
            if not _is_whole(value):
                self.refuse(f"{key}={value} must be an integer")
            if least is not None and value < least:
                self.refuse(f"{key}={value}, allowed are >= {least}")

    def window(self, n_layers: Any) -> None:
        """Take the keys of sliding windows, which no layer may have."""
        self.expect("layer_types", ["full_attention"] * n_layers if _is_whole(n_layers) else [])
        if self._left.get("use_sliding_window") is False:  # then its width is of no matter
            self.take("sliding_window")

    def flag(self, *keys: str) -> bool | None:
        """True or false, None where there is none (UserError for anything else)."""
        value = self.take(*keys)
        if value is not None and not isinstance(value, bool):
            self.refuse(f"config.json says {_told(keys[-1], value)}, allowed are true and false")
        return value

    def positive(self, key: str, value: Any, default: float | None = None) -> float | None:
        """A number > 0, the default where there is none (UserError for anything else)."""
        if value is None:
            return default
        if not _is_number(value) or not 0 < value < math.inf:
            self.refuse(f"{key}={value} must be a number > 0")
        return float(value)

    def layer_ids(self, key: str, value: Any) -> tuple[int, ...]:
        """Target layers that a file names; which of them exist is `check_layers`'s to say."""
        if value is None:
            self.refuse(f"config.json lacks the key {key}")
        if not isinstance(value, list | tuple) or not value or not all(map(_is_whole, value)):
            self.refuse(f"{key}={value} must be a list of integers")
        return tuple(value)

    def layer_shape(self, shape: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments of a transformers config: `shape` without nulls, numbers checked."""
        given = {key: value for key, value in shape.items() if value is not None}
        rope = given.get("rope_parameters", {})
        for key in ROPE_KEYS[rope.get("rope_type", "default")]:
            if key in _ROPE_NEEDED and key not in rope:
                self.refuse(f"config.json lacks the key {key} of rope_type={rope['rope_type']}")
        numbers = {
            key: value for key, value in rope.items() if key not in ("rope_type", "truncate")
        }
        for key, value in {"rms_norm_eps": given.get("rms_norm_eps", 1e-6), **numbers}.items():
            self.positive(key, value)
        known = ("head_dim", "max_position_embeddings")
        self.whole(given, [key for key in known if key in given], least=1)
        heads, groups = given["num_attention_heads"], given["num_key_value_heads"]
        if heads % groups:
            self.refuse(
                f"num_attention_heads={heads} is no multiple of num_key_value_heads={groups}"
            )
        return given


def check_layers(ids: Sequence[int], depth: int, where: str) -> None:
    """Refuse layers that a target of `depth` layers does not have, or that drafters never read."""
    if min(ids) < 0 or max(ids) >= depth:
        raise UserError(
            f"drafter {where}: target layers {list(ids)} out of range, allowed are 0..{depth - 2} "
            f"of a target of {depth} layers"
        )
    if max(ids) == depth - 1:
        raise UserError(
            f"drafter {where}: target layers {list(ids)} hold the last one, which the published "
            f"drafters read after the final norm: not built; allowed are 0..{depth - 2}"
        )


def static_rope(parameters: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Rotary parameters of a new drafter after those of its target, None where it has none.

    The target's own where its angles do not depend on the length and turn whole heads, else plain
    ones with the same base: a drafter that is still to be trained is free in this.
    """
    rope = dict(parameters or {})
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    if nested:  # by kind of layer
        rope = dict(rope.get("full_attention") or nested[0])
    if not rope:
        return None
    kind, whole = rope.get("rope_type", "default"), rope.get("partial_rotary_factor") in (None, 1)
    kind = kind if kind in ROPE_KEYS and whole else "default"
    kept = {key: rope[key] for key in ("rope_theta", *ROPE_KEYS[kind]) if key in rope}
    return {"rope_type": kind, **kept}


@cache
def _plain() -> dict[str, Any]:
    """Values of transformers' base configurations, at which a key changes nothing."""
    bases = (PreTrainedConfig(), LlamaConfig(), Qwen3Config())
    return {key: value for base in bases for key, value in base.to_dict().items()}


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _told(key: str, value: Any) -> str:
    text = str(value).replace("\n", " ")
    return f"{key}={text if len(text) <= _TEXT else text[:_TEXT] + '...'}"
