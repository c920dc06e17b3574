"""Coding prompts made from the docstrings of Python's own standard library, or of other packages.

Signatures and docstrings are read from the source files with `ast`; nothing is imported. The
prompts are those of what is installed: another version has a few others, while a function whose
docstring did not change keeps its id, text and split.
"""

import ast
import hashlib
import logging
import re
import sysconfig
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from doctest import DocTestParser
from importlib.util import find_spec
from pathlib import Path

from blockpilot.base.errors import UserError
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
class DocstringSet:
    """One prompt per public, documented function or method, ordered by conversation hash.

    Attributes:
        packages: installed packages to read; none: the standard library.
        examples: doctest examples of one line that follow the description, at most.
    """

    name: str
    held_out: bool
    packages: Sequence[str]
    examples: int

    def load(self, path: Path | None = None) -> list[Prompt]:
        if path is not None:
            raise UserError(f"prompt set '{self.name}' reads docstrings, not {path}")
        prompts: dict[str, Prompt] = {}
        for folder, outer in self._folders():
            for file in sorted(folder.rglob("*.py")):
                parts = (*outer, *file.relative_to(folder).with_suffix("").parts)
                module = tuple(part for part in parts if part != "__init__")
                if all(map(_is_public, module)) and SKIPPED.isdisjoint(module):
                    for key, text in _requests(".".join(module), file, self.examples):
                        prompts.setdefault(
                            key, Prompt(f"{self.name}/{key}", self.name, (text,), UNASSIGNED)
                        )
        where = f"docstrings of {', '.join(self.packages) or 'the standard library'}"
        return check_prompts(sorted(prompts.values(), key=lambda prompt: prompt.hash), where)

    def _folders(self) -> Iterator[tuple[Path, tuple[str, ...]]]:
        """Folders with the names that lead to them; UserError for a package that is missing."""
        if not self.packages:
            yield Path(sysconfig.get_paths()["stdlib"]), ()
        for package in self.packages:
            spec = find_spec(package)
            if spec is None or not spec.submodule_search_locations:
                raise UserError(f"prompt set '{self.name}': package {package} is not installed")
            yield Path(spec.submodule_search_locations[0]), (package,)


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def _requests(module: str, file: Path, n_examples: int) -> Iterator[tuple[str, str]]:
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
        doc += _examples(function, n_examples)
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


def _examples(function: ast.FunctionDef, n_most: int) -> str:
    """The first examples of a docstring that take one line each, as they stand in it."""
    if not n_most:
        return ""
    try:
        found = DocTestParser().get_examples(ast.get_docstring(function) or "")
    except ValueError:  # an example that is indented wrongly
        return ""
    short = [
        f"\n>>> {each.source}{each.want.rstrip()}"
        for each in found
        if each.want and each.source.count("\n") == each.want.count("\n") == 1
    ]
    return "".join(["\n", *short[:n_most], "\n"]) if short else ""
