"""Where things lie: the configuration shipped with the code, and the cache of prepared weights."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from blockpilot.base.errors import UserError

_PACKAGE = Path(__file__).resolve().parents[1]


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


def names_of(folders: Sequence[Path], what: str) -> list[str]:
    """Name each folder by the end of its path, as long as it takes to tell it from the others.

    Raises:
        UserError: one is given twice; told with the option `what`.
    """
    paths = [folder.resolve() for folder in folders]
    for folder, count in Counter(paths).items():
        if count > 1:
            raise UserError(f"{what}: {folder} is given twice")
    depths = [1] * len(paths)
    while True:
        names = ["/".join(path.parts[-depth:]) for path, depth in zip(paths, depths, strict=True)]
        counts = Counter(names)
        if len(counts) == len(names):
            return names
        depths = [depth + (counts[name] > 1) for depth, name in zip(depths, names, strict=True)]
