"""Folders that lie on this machine or on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download

from blockpilot.base.errors import UserError
from blockpilot.base.json_values import first_line


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
