"""Numbered migrations `migrations/NNNN_name.sql`, each run once, in order, up to `user_version`."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from edgeinfer.errors import StoreError

FOLDER = Path(__file__).with_name("migrations")
_NAME = re.compile(r"(\d{4})_[a-z_]+\.sql")


def available(folder: Path = FOLDER) -> list[Path]:
    """List the migrations in order. Raises StoreError if one is missing from the build."""
    found = {int(m[1]): p for p in sorted(folder.glob("*.sql")) if (m := _NAME.fullmatch(p.name))}
    if not found or list(found) != list(range(1, len(found) + 1)):
        raise StoreError(f"the migrations in {folder} are incomplete", hint="install edgeinfer again")
    return list(found.values())


def migrate(db: sqlite3.Connection, name: str, scripts: list[Path] | None = None) -> int:
    """Bring `db` (in autocommit mode) to the newest schema and return its number.

    `name` is for the words of an error.

    Raises StoreError when it was made by a newer edgeinfer, sqlite3.Error when a statement fails
    (nothing is changed then).
    """
    scripts = available() if scripts is None else scripts
    if (reached := _version(db)) == len(scripts):
        return reached
    db.execute("BEGIN IMMEDIATE")
    try:
        reached = _version(db)  # another process may have migrated it while this one waited
        if reached > len(scripts):
            raise StoreError(
                f"{name} was made by a newer edgeinfer (schema {reached}, this one knows "
                f"{len(scripts)})",
                hint="use that version, or move the file aside",
            )
        for script in scripts[reached:]:
            for statement in _statements(script.read_text("utf-8")):
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {len(scripts)}")
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise
    return len(scripts)


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _statements(script: str) -> Iterator[str]:
    """One statement at a time: `executescript` would commit the transaction they belong to."""
    gathered = ""
    for line in script.splitlines(keepends=True):
        gathered += line
        if sqlite3.complete_statement(gathered):
            yield gathered
            gathered = ""
