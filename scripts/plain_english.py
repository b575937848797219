"""Count names without meaning; `make lint` runs this, and no count may rise.

`plain_english.py` fails if a folder has more empty names (`found`, `one`, `given`) or more functions
named by only a participle (`listed`, `_chosen`) than [limits] of scripts/words.toml allows. `--list`
prints each place; `--update` lowers the limits to today's counts, and never raises one.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator

from style import FOLDERS, ROOT

_TABLE = ROOT / "scripts/words.toml"
_table = tomllib.loads(_TABLE.read_text("utf-8"))
_EMPTY = frozenset(_table["names"]["empty"].split())
_PARTICIPLES = frozenset(_table["names"]["participles"].split())
_NOT_PARTICIPLES = frozenset(_table["names"]["not_participles"].split())
_KINDS = ("empty", "participle")


def is_participle(name: str) -> bool:
    """Return whether a function's name is one word and a past participle: `listed`, `_chosen`."""
    word = name.strip("_").lower()
    regular = re.fullmatch("[a-z]{3,}ed", word) and word not in _NOT_PARTICIPLES
    return bool(regular) or word in _PARTICIPLES


def names(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the kind (`empty`, `participle`) and the name of each finding in a Python file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if is_participle(node.name):
                yield node.lineno, "participle", node.name
        elif (name := _assigned_name(node)) and name.strip("_") in _EMPTY:
            yield node.lineno, "empty", name  # type: ignore[attr-defined]


def _assigned_name(node: ast.AST) -> str:
    """Return the variable, argument or attribute that `node` assigns, or ""."""
    match node:
        case (
            ast.Name(id=name, ctx=ast.Store())
            | ast.arg(arg=name)
            | ast.Attribute(attr=name, ctx=ast.Store())
        ):
            return name
    return ""


def _findings(folder: str) -> Iterator[tuple[str, str, str]]:
    """Yield the place (`FILE:LINE`), kind and name of each finding in a folder."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for line, kind, name in names(path.read_text("utf-8")):
            yield f"{path.relative_to(ROOT)}:{line}", kind, name


def lower_limits(table: str, counts: dict[str, Counter[str]]) -> str:
    """Return the text of words.toml with each limit lowered to its count."""

    def line(match: re.Match[str]) -> str:
        limits = zip(_KINDS, (int(match[2]), int(match[3])), strict=True)
        empty, participle = (min(limit, counts[match[1]][kind]) for kind, limit in limits)
        return f"{match[1]} = {{ empty = {empty}, participle = {participle} }}"

    return re.sub(r"(?m)^(\w+) = \{ empty = (\d+), participle = (\d+) \}", line, table)


def main(argv: list[str]) -> int:
    """Compare the counts with the limits; return 1 if a count is above its limit."""
    counts = {}
    for folder in FOLDERS:
        findings = list(_findings(folder))
        counts[folder] = Counter(kind for _, kind, _ in findings)
        if "--list" in argv:
            print(*(f"{place}: {kind}: {name}" for place, kind, name in findings), sep="\n")
    if "--update" in argv:
        _TABLE.write_text(lower_limits(_TABLE.read_text("utf-8"), counts), "utf-8")
        return 0
    status = 0
    for folder, limits in _table["limits"].items():
        for kind in _KINDS:
            if counts[folder][kind] > limits[kind]:
                status = 1
                n, most = counts[folder][kind], limits[kind]
                print(f"{folder}: {n} names of the kind “{kind}”; at most {most} are allowed")
    if status:
        print(
            "hint: use a name that says what it contains or does; scripts/plain_english.py --list prints each place"
        )
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
