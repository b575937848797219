"""Check Python files and documents for faults that ruff does not find; `make lint` runs this.

- A conditional expression inside another, and an assignment of three or more names at once, unless
  the line ends with the comment `# together: WHY`.
- Words of scripts/words.toml in docstrings, comments, prose strings, names and documents, and docstrings
  that do not begin with a verb.

`style.py PATH…` checks only these paths, also if words.toml lists them as unconverted.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("edgeinfer", "build", "benchmarks", "scripts", "tests")
DOCUMENTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs", ".github")
#: Files that may contain refused words: the page that explains them, and their table.
_EXEMPT = ("docs/glossary.md", "scripts/words.toml")
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@cache
def _table() -> dict[str, dict[str, object]]:
    return tomllib.loads((ROOT / "scripts/words.toml").read_text("utf-8"))


@cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    return [
        (re.compile(rf"(?<![\w-]){'(?:' + word + ')'}(?![\w-])", re.IGNORECASE), str(instead))
        for word, instead in _table()["words"].items()
    ]


def words(text: str) -> Iterator[tuple[str, str]]:
    """Yield each refused word of `text`, with the advice what to write instead."""
    for pattern, instead in _patterns():
        for match in pattern.finditer(text):
            yield match[0], instead


def findings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and message of each nested conditional expression and each wide assignment."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.IfExp) and sum(isinstance(n, ast.IfExp) for n in ast.walk(node)) > 1:
            yield node.lineno, "a conditional expression inside another"
        elif _is_wide(node) and "# together: " not in lines[(node.end_lineno or 1) - 1]:
            yield node.lineno, "an assignment of three or more names"


def _is_wide(node: ast.AST) -> TypeGuard[ast.Assign]:
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and len(node.value.elts) >= 3
        and isinstance(node.targets[0], ast.Tuple)
    )


def python_words(source: str, *, strings: bool = True) -> Iterator[tuple[int, str]]:
    """Yield line and message of each refused word, and of each wrong first word of a docstring.

    Without `strings`, strings other than docstrings are skipped: in tests they may be prompts.
    """
    for line, text in _prose(source, strings=strings):
        for word, instead in words(text):
            yield line, f"“{word}”: {instead}"
    not_first = _table()["docstrings"]["not_first"]
    assert isinstance(not_first, list)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "").split(" ")[0]
            if first in not_first:
                yield node.lineno, f"a docstring that begins with “{first}”: begin with a verb"


def _prose(source: str, *, strings: bool) -> Iterator[tuple[int, str]]:
    docstrings = set()
    for node in ast.walk(tree := ast.parse(source)):
        if isinstance(node, _Definition):
            yield node.lineno, re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", node.name)
        if isinstance(node, _Definition | ast.Module) and ast.get_docstring(node, clean=False):
            docstrings.add(id(node.body[0].value))  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        is_prose = isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
        if is_prose and (strings or id(node) in docstrings):
            yield node.lineno, " ".join(node.value.split())
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def document_words(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and message of each refused word in a document, except in code and generated parts."""
    fenced = generated = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith(("<!-- generated", "<!-- end")):
            generated = line.startswith("<!-- generated")
        elif line.lstrip().startswith("```"):
            fenced = not fenced
        if not fenced and not generated:
            for word, instead in words(re.sub(r"`[^`]*`|\]\([^)]*\)", " ", line)):
                yield number, f"“{word}”: {instead}"


def _files(paths: list[Path], suffixes: tuple[str, ...]) -> list[Path]:
    return sorted(
        file
        for path in paths
        for file in (path.rglob("*") if path.is_dir() else [path])
        if file.suffix in suffixes and file.is_file()
    )


def _is_unconverted(name: str) -> bool:
    paths = _table()["unconverted"]["paths"]
    assert isinstance(paths, list)
    return any(name == path or name.startswith(f"{path}/") for path in paths)


def _check_files(paths: list[Path]) -> Iterator[str]:
    for path in _files(paths or [ROOT / folder for folder in FOLDERS], (".py",)):
        name, source = path.relative_to(ROOT).as_posix(), path.read_text("utf-8")
        of_words = iter(())
        if paths or not _is_unconverted(name):
            of_words = python_words(
                source, strings=name.startswith(("edgeinfer/", "scripts/", "build/"))
            )
        for line, message in [*findings(source), *of_words]:
            yield f"{name}:{line}: {message}"
    for path in _files(paths or [ROOT / name for name in DOCUMENTS], (".md", ".yml")):
        name = path.relative_to(ROOT).as_posix()
        if name not in _EXEMPT and (paths or not _is_unconverted(name)):
            for line, message in document_words(path.read_text("utf-8")):
                yield f"{name}:{line}: {message}"


def main(argv: list[str]) -> int:
    """Print every finding; return 1 if there is any."""
    messages = list(_check_files([Path(arg).resolve() for arg in argv]))
    print(*messages, sep="\n", end="\n" if messages else "")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
