"""How a target's forwards are run: by the model's own code, by kernels in C++, or compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable

from blockpilot.base.errors import UserError
from blockpilot.decoding.checks import check_target
from blockpilot.decoding.compiled import CompiledTarget
from blockpilot.decoding.native.target import NativeTarget, why_not_native
from blockpilot.decoding.target import Target

log = logging.getLogger(__name__)


def _native(target: Target) -> Target:
    """The native engine, tried on this target against the model's own code."""
    native = NativeTarget(target)
    check_target(native)
    return native


def _auto(target: Target) -> Target:
    """The native engine where it can run this target, else the eager one."""
    reason = why_not_native(target)
    if reason is not None:
        log.info("engine eager; not native, since %s", reason)
        return target
    try:
        return _native(target)
    except UserError as error:  # a compiler that cannot make the kernels, or a foreign model
        log.warning("engine eager, since the native one cannot be made: %s", error)
        return target


ENGINES: dict[str, Callable[[Target], Target]] = {
    "auto": _auto,
    "eager": lambda target: target,
    "native": _native,
    "compiled": CompiledTarget,
}


def with_engine(target: Target, engine: str) -> Target:
    """The same target behind an engine. Raises UserError for one that cannot run it."""
    if engine not in ENGINES:
        raise UserError(f"engine={engine}: allowed are {', '.join(ENGINES)}")
    return ENGINES[engine](target)
