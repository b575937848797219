"""Check what ruff has no rule for: `make check` runs it over every Python file of the project.

A conditional expression inside another, and an assignment of three or more names at once; a trailing
`# together: WHY` allows the latter where the names belong together.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("edgeinfer", "build", "benchmarks", "tools", "tests")


def findings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line of each finding, and what it is."""
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


def main() -> int:
    """Print every finding; exit 1 where there is one."""
    found = 0
    for path in sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")):
        for line, what in findings(path.read_text("utf-8")):
            print(f"{path.relative_to(ROOT)}:{line}: {what}")
            found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
