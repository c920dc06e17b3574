"""Tiny drafters of published forms, made and run by the packages that define the forms.

    python scripts/form_fixtures.py        # remakes tests/fixtures/

The packages go into a temporary folder; what their imports want and nothing here calls is faked.
target.safetensors is what all of them read: `features` [C, n * D] of positions 0..C-1 and their
tokens `context`, `embedding` and `head` [V, D], and the `anchor`'s token, at position C. A fixture
is a folder, config.json and model.safetensors as published, and beside it <name>.safetensors with
what the package makes of it: `hidden` [S, D] of a block's drafting slots, `logits` [S, rows] along
the chain that it drafts, and `drafts` [S] as target ids.
"""

from __future__ import annotations

import importlib.machinery
import os
import subprocess
import sys
import tempfile
import types
from typing import Any

import torch
from form_fixtures_blocks import of_dflash, of_specforge, of_speculators
from form_fixtures_heads import heads_of_speculators, read_exports

PACKAGES = ("dflash==0.1.0", "speculators==0.9.0", "specforge==0.2.0")
FAKED = ("openai", "hs_connectors")  # clients of servers


class Fake(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class FakeFinder:
    """Finds the faked packages and all below them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in FAKED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> Fake:
        module = Fake(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: Any) -> None:
        pass


MAKERS = {
    "dflash": of_dflash,
    "specforge": of_specforge,
    "speculators": of_speculators,
    "heads": heads_of_speculators,
    "exports": read_exports,
}


def main() -> None:
    """Install the packages aside, then make the fixtures in a process that finds them."""
    if len(sys.argv) > 1:
        sys.meta_path.append(FakeFinder())
        with torch.no_grad():
            MAKERS[sys.argv[1]]()
        return
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
        subprocess.run([*pip, *PACKAGES], check=True)
        for name in MAKERS:
            environment = os.environ | {"PYTHONPATH": folder, "HF_HUB_OFFLINE": "1"}
            subprocess.run([sys.executable, __file__, name], check=True, env=environment)


if __name__ == "__main__":
    main()
