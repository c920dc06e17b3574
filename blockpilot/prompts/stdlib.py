"""Coding prompts made from the docstrings of Python's own standard library.

Signatures and docstrings are read from the source files with `ast`; nothing is imported. The
prompts are those of the running interpreter's library: another Python version has a few others,
while a function whose docstring did not change keeps its id, text and split.
"""

import ast
import hashlib
import logging
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blockpilot.errors import UserError
from blockpilot.prompts.base import UNASSIGNED, Prompt, check_prompts

log = logging.getLogger(__name__)

MIN_WORDS = 6  # shorter docstrings do not say what the function does
MAX_WORDS = 120

SKIPPED = frozenset(
    (
        *("test", "tests", "idlelib", "turtledemo", "ensurepip", "pydoc_data"),
        *("lib2to3", "distutils", "tkinter", "site-packages"),
    )
)
"""Folders that hold tests, programs or data rather than a library, or that often are missing."""

STUB_FORMAT = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\ndef {name}({args}):\n{quoted}\n```"
)
FUNCTION_FORMATS = (
    # The field's code benchmarks ask in this form, so a drafter should meet it often.
    *(STUB_FORMAT,) * 4,
    "Write a Python function `{name}({args})`.\n\n{doc}",
    "Complete the following Python function.\n```python\ndef {name}({args}):\n{quoted}\n```",
    "Implement this function and make sure that it handles edge cases:\n"
    "```python\ndef {name}({args}):\n{quoted}\n```",
    "I need a Python function named `{name}` with the parameters `({args})`. Description: {doc}",
    "Write a solution for this function stub, with a short example of its use.\n"
    "```python\ndef {name}({args}):\n{quoted}\n```",
)
METHOD_FORMATS = (
    *(STUB_FORMAT.replace("{args}", "{free_args}"),) * 3,
    "Write a Python class `{owner}` with a method `{name}({args})`.\n\n{doc}",
    "Complete the method in this Python class.\n"
    "```python\nclass {owner}:\n    def {name}({args}):\n{quoted_deeper}\n```",
    "Explain what a method `{name}({args})` of a class `{owner}` would do, given its docstring,"
    " and implement a simple version in Python.\n\n{doc}",
)


@dataclass(frozen=True, kw_only=True)
class StdlibSet:
    """One prompt per public, documented function or method, ordered by conversation hash."""

    name: str
    held_out: bool

    def load(self, path: Path | None = None) -> list[Prompt]:
        if path is not None:
            raise UserError(f"prompt set '{self.name}' reads the standard library, not {path}")
        library = Path(sysconfig.get_paths()["stdlib"])
        prompts: dict[str, Prompt] = {}
        for file in sorted(library.rglob("*.py")):
            parts = file.relative_to(library).with_suffix("").parts
            module = tuple(part for part in parts if part != "__init__")
            if all(map(_is_public, module)) and SKIPPED.isdisjoint(module):
                for key, text in _requests(".".join(module), file):
                    prompts.setdefault(
                        key, Prompt(f"{self.name}/{key}", self.name, (text,), UNASSIGNED)
                    )
        where = f"standard library in {library}"
        return check_prompts(sorted(prompts.values(), key=lambda prompt: prompt.hash), where)


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def _requests(module: str, file: Path) -> Iterator[tuple[str, str]]:
    """(key, request) of the documented functions of one source file."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        log.debug("left out %s", file, exc_info=True)
        return
    for owner, function in _functions(tree):
        doc = _first_paragraph(function)
        if doc is None:
            continue
        key = f"{module}.{owner}.{function.name}" if owner else f"{module}.{function.name}"
        formats = METHOD_FORMATS if owner else FUNCTION_FORMATS
        args = ast.unparse(function.args)
        digest = hashlib.sha256(key.encode()).digest()
        yield (
            key,
            formats[int.from_bytes(digest[:8], "big") % len(formats)].format(
                owner=owner,
                name=function.name,
                args=args,
                free_args=args.removeprefix("self").removeprefix(", "),
                doc=doc,
                quoted=textwrap.indent(f'"""{doc}"""', "    "),
                quoted_deeper=textwrap.indent(f'"""{doc}"""', "        "),
            ),
        )


def _functions(tree: ast.Module) -> Iterator[tuple[str | None, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and _is_public(node.name):
            yield None, node
        elif isinstance(node, ast.ClassDef) and _is_public(node.name):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and _is_public(method.name):
                    yield node.name, method


def _first_paragraph(function: ast.FunctionDef) -> str | None:
    """The part of the docstring before its first blank line, if it is of a useful length."""
    doc = re.split(r"\n\s*\n", ast.get_docstring(function) or "", maxsplit=1)[0].strip()
    return doc if MIN_WORDS <= len(doc.split()) <= MAX_WORDS else None
