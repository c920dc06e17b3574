"""The config.json of a speculators checkpoint, in which the layers' keys are nested."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockpilot.base.errors import UserError

_LAYERS = "transformer_layer_config"
_ABOUT = ("speculators_config", "speculators_version")  # say nothing of the network


def lifted(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The same with the layers' keys at the top, less what says nothing of the network.

    Raises UserError where the layers are no mapping, or where both levels have a key with different
    values. `architectures` and `model_type` at the top name the speculator, those below the layers:
    the layers' `model_type` stays.
    """
    layers = raw.get(_LAYERS)
    if not isinstance(layers, Mapping):
        raise UserError(f"drafter {where}: {_LAYERS}={layers} must hold the keys of the layers")
    top = {key: value for key, value in raw.items() if key not in (_LAYERS, *_ABOUT)}
    top.pop("model_type", None)
    inner = {key: value for key, value in layers.items() if key != "architectures"}
    for key in inner.keys() & top.keys():
        if None not in (inner[key], top[key]) and inner[key] != top[key]:
            raise UserError(
                f"drafter {where}: config.json says {key}={top[key]}, but "
                f"{_LAYERS}.{key}={inner[key]}: make them agree"
            )
    return {**inner, **{key: value for key, value in top.items() if value is not None}}
