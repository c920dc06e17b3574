"""Folders that lie on this machine or on the Hugging Face hub."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from huggingface_hub import constants, get_session, snapshot_download

from blockpilot.base.errors import UserError
from blockpilot.base.json_values import first_line

log = logging.getLogger(__name__)

_PATIENCE = 10  # seconds that the hub has for its first answer


def folder_of(what: str, place: str, *, pickles: bool = False) -> Path:
    """The folder `place`, or a local copy of the hub repository of that name.

    Only config.json and safetensors are fetched, with `pickles` also *.bin: no code. Raises
    UserError, beginning with `what`, when there is neither.
    """
    if Path(place).is_dir():
        return Path(place)
    try:
        wanted = ["config.json", "*.safetensors", *(["*.bin"] if pickles else [])]
        return Path(snapshot_download(place, allow_patterns=wanted))
    except Exception as error:  # the hub client raises a dozen unrelated kinds
        raise UserError(
            f"{what}: neither a folder nor reachable on the hub ({first_line(error)}); give a "
            "local folder or fill HF_HOME"
        ) from error


@contextmanager
def without_retries(place: str | Path) -> Iterator[None]:
    """Within it `place` is read from the hub's local cache alone where the hub is out of reach.

    Left to itself the hub's client tries each file six times, for half a minute.
    """
    offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = offline or not (Path(place).is_dir() or hub_in_reach())
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline


@cache
def hub_in_reach() -> bool:
    """Whether the hub answers at all, asked and told once a process."""
    try:
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE)
    except Exception as error:  # the HTTP client has a family of errors
        log.warning("hub out of reach (%s): its local cache alone is read", first_line(error))
        return False
    return True
