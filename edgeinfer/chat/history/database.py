"""The SQLite file of the conversations: schema, migrations, and the copies made before a migration."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shlex
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from edgeinfer.errors import StoreError

_MIGRATIONS = Path(__file__).with_name("migrations")
_NAME = re.compile(r"(\d{4})_[a-z_]+\.sql")

#: Age (s) at which a copy of the database is deleted. A copy is made before each migration of the
#: schema.
_KEEP_COPIES_S = 30 * 24 * 3600.0

#: Age (s) at which an unfinished copy of the database is deleted: the process that began the copy must
#: have ended.
_COPYING_S = 3600.0


@contextlib.contextmanager
def store_errors(name: str) -> Iterator[None]:
    """Raise StoreError with a hint instead of sqlite3.Error and OSError in the `with` block.

    `name` is the path of the conversation file, which the error names.
    """
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        hint = f"rename {name}: a new file will be created"
        if "unable to open" in str(error) or "readonly" in str(error):
            hint = f"check the permissions of {name} and its folder"
        elif any(phrase in str(error) for phrase in ("full", "No space", "disk I/O")):
            hint = "free some disk space; if there is enough, check the disk"
        elif "locked" in str(error):
            hint = "another edgeinfer is writing: try again"
        raise StoreError(f"the conversations in {name} cannot be used: {error}", hint=hint) from error


def connect(uri: str) -> sqlite3.Connection:
    """Open a file of conversations by its SQLite URI. Raises sqlite3.Error."""
    db = sqlite3.connect(uri, isolation_level=None, timeout=5.0, uri=True)
    db.execute("PRAGMA secure_delete = ON")  # overwrite deleted conversations in the file
    return db


def is_current(path: Path) -> bool:
    """Return whether the file has this version's schema; False if SQLite cannot read the file.

    A purge checks this first, because it must not migrate the file: a user who only tries out a new
    version of edgeinfer must be able to go back to an older one.
    """
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(connect(f"{path.as_uri()}?mode=rw")) as db,
    ):
        return _schema(db) == len(migrations())
    return False


def migrations(folder: Path = _MIGRATIONS) -> list[Path]:
    """Return the migration scripts, in order. Raises StoreError if one is missing."""
    scripts = {int(m[1]): p for p in sorted(folder.glob("*.sql")) if (m := _NAME.fullmatch(p.name))}
    if not scripts or list(scripts) != list(range(1, len(scripts) + 1)):
        raise StoreError(f"files of edgeinfer are missing in {folder}", hint="install edgeinfer again")
    return list(scripts.values())


def migrate(db: sqlite3.Connection, name: str, scripts: list[Path] | None = None) -> int:
    """Migrate `db` (in autocommit mode) to the newest schema, and return its number.

    `name` is the path of the file, `scripts` the migrations (None: all). The file is first copied to
    `NAME.schema-N`, because older versions of edgeinfer cannot read a migrated file. Foreign keys are
    off afterwards. Raises StoreError if a newer edgeinfer made the file, sqlite3.Error if a statement
    fails. After an error, the file is unchanged.
    """
    scripts = migrations() if scripts is None else scripts
    if (reached := _schema(db)) == len(scripts):
        return reached
    if 0 < reached < len(scripts):
        _copy(db, name, reached)
    db.execute("PRAGMA foreign_keys = OFF")  # with foreign keys, DROP TABLE would delete the turns
    db.execute("BEGIN IMMEDIATE")
    try:
        reached = _schema(db)  # another process may have migrated the file during the wait
        if reached > len(scripts):
            schemas = f"schema {reached}; this version reads schema {len(scripts)}"
            problem = f"{name} was made by a newer edgeinfer ({schemas})"
            raise StoreError(problem, hint=_hint_of_newer(name, len(scripts)))
        for script in scripts[reached:]:
            for statement in _statements(script.read_text("utf-8")):
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {len(scripts)}")
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise
    return len(scripts)


def _list_suffixed(name: str, pattern: str) -> list[Path]:
    """List the files named `name` plus a suffix that matches `pattern`; none for a store in memory."""
    return sorted(Path(name).parent.glob(glob.escape(Path(name).name) + pattern)) if name else []


def _copy(db: sqlite3.Connection, name: str, version: int) -> None:
    """Copy the database file to `{name}.schema-{version}` before a migration.

    Do nothing for a store in memory, or if another process has migrated the file. Raises
    sqlite3.Error, OSError.
    """
    if not Path(name).is_file():
        return
    scratch = f"{name}.{os.urandom(8).hex()}.new"
    os.close(os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        db.execute("VACUUM INTO ?", (scratch,))
        with contextlib.closing(connect(scratch)) as copy:
            if _schema(copy) == version:  # otherwise another process has migrated the file meanwhile
                os.replace(scratch, f"{name}.schema-{version}")
    finally:
        Path(scratch).unlink(missing_ok=True)


def _hint_of_newer(name: str, version: int) -> str:
    copy = Path(f"{name}.schema-{version}")
    if copy.exists():  # the log (-wal) is removed first: SQLite would apply it to the copy
        remove = shlex.join(["rm", "-f", f"{name}-wal", f"{name}-shm"])
        move = shlex.join(["mv", str(copy), name])
        copying = f"use the copy made before the migration: {remove}; {move}"
        return f"use that version, or end every edgeinfer and {copying}"
    return "use that version, or move the file aside"


def _schema(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _statements(script: str) -> Iterator[str]:
    """Yield the statements of a script; `executescript` would commit the open transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def delete_rows(db: sqlite3.Connection, ids: Sequence[int], condition: str = "") -> None:
    """Delete conversations by id, if they satisfy the SQL `condition` (`AND …`, "" for none).

    The search index is rewritten, so that it no longer contains words of deleted conversations.
    """
    if ids:
        rows = [(conversation_id,) for conversation_id in ids]
        db.executemany(f"DELETE FROM conversation WHERE id = ? {condition}", rows)
        names = "SELECT name FROM sqlite_master WHERE sql LIKE 'CREATE VIRTUAL TABLE%'"
        for (table,) in db.execute(names).fetchall():
            db.execute(f"INSERT INTO {table} ({table}) VALUES ('optimize')")


def clean_copies(name: str, purged: Sequence[int]) -> None:
    """Delete the copies that migrations of the file `name` made more than 30 days ago.

    The conversations with the ids `purged` are deleted from newer copies. Raises StoreError.
    """
    for path in _list_suffixed(name, ".*.new*"):  # copies that a killed process left unfinished
        with store_errors(str(path)), contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _COPYING_S:
                path.unlink()
    copies = _list_suffixed(name, ".schema-*")
    for path in [path for path in copies if path.suffix.removeprefix(".schema-").isdigit()]:
        # another process may delete this copy meanwhile: with `mode=rw`, SQLite does not create it
        # again
        with store_errors(str(path)), contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _KEEP_COPIES_S:
                path.unlink()
            elif purged:
                with contextlib.closing(connect(f"{path.as_uri()}?mode=rw")) as copy:
                    copy.execute("PRAGMA foreign_keys = ON")
                    delete_rows(copy, purged)
