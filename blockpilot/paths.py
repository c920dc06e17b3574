"""Where things lie: the configuration shipped with the code, and the cache of prepared weights."""

import os
from pathlib import Path

from blockpilot.errors import UserError

_PACKAGE = Path(__file__).resolve().parent


def conf_dir() -> Path:
    """Return the folder of the Hydra configuration.

    A wheel carries it inside the package, a checkout (plain or editable install) beside it.
    Hydra needs the absolute path: relative ones break in wheels and console scripts.

    Raises:
        UserError: the installation lacks the folder.
    """
    for folder in (_PACKAGE / "conf", _PACKAGE.parent / "conf"):
        if folder.is_dir():
            return folder
    raise UserError(f"no conf/ in or beside {_PACKAGE}: install blockpilot again")


def cache_dir() -> Path:
    """Return the folder of weights prepared once and reused; it may not exist yet.

    $BLOCKPILOT_CACHE, or ~/.cache/blockpilot.
    """
    chosen = os.environ.get("BLOCKPILOT_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "blockpilot"
