"""The conversations of a user in one SQLite file. Every write is committed before its method returns.

An answer that is being written goes to a journal piece by piece, so what was shown survives `kill -9`;
its end folds the journal into the turn. Whoever reads a turn whose process died sees content and
journal joined, as "interrupted". One thread; several processes may hold the file open (write-ahead
log).
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from edgeinfer.chat.history.migrate import migrate
from edgeinfer.chat.history.values import Attachment, Conversation, Stats, Status, Turn
from edgeinfer.errors import EdgeInferError, StoreError
from edgeinfer.platform import paths
from edgeinfer.runtime.prefix_cache.store import forget_conversation

#: An answer without a new piece for so long was left behind by a process that died.
STALE_MS = 60_000

#: Deleted conversations are kept so long, for undo.
UNDO_MS = 24 * 3600 * 1000

_TURN = (
    "id, conversation_id, parent_id, role, content, reasoning, attachments,"
    " status, error, model, stats, cut_summary, created_ms"
)
_CONVERSATION = "id, title, model, system_prompt, sampling, head_id, draft, created_ms, updated_ms"


def store_path() -> Path:
    """conversations.db in the data directory."""
    return paths.data_dir() / "conversations.db"


def now_ms() -> int:
    """Milliseconds since 1970."""
    return int(time.time() * 1000)


@contextlib.contextmanager
def speaking(name: str) -> Iterator[None]:
    """Turn sqlite3's errors into StoreError with a step a person can take."""
    try:
        yield
    except sqlite3.Error as error:
        hint = (
            "free some room on the disk"
            if "full" in str(error)
            else f"move {name} aside: a new one is made"
        )
        if "locked" in str(error):
            hint = "another edgeinfer is writing: try again"
        raise StoreError(f"the conversations in {name} cannot be used: {error}", hint=hint) from error


class Store:
    """Open with `Store.open()`. `clock` gives milliseconds since 1970."""

    def __init__(self, db: sqlite3.Connection, name: str, clock: Callable[[], int] = now_ms) -> None:
        self._db = db
        self.name = name
        self.clock = clock

    @classmethod
    def open(cls, path: Path | None = None, clock: Callable[[], int] = now_ms) -> Store:
        """Open the file (created 0600) and migrate it to the newest schema. Raises StoreError."""
        file = path or store_path()
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise StoreError(
                f"{file}: {error.strerror}", hint="check the directory, or set XDG_DATA_HOME"
            ) from error
        with speaking(str(file)):
            db = sqlite3.connect(file, isolation_level=None, timeout=5.0)
            try:
                db.execute("PRAGMA journal_mode = WAL")
                # a killed process loses nothing; a power cut the last moments
                db.execute("PRAGMA synchronous = NORMAL")
                db.execute("PRAGMA foreign_keys = ON")
                db.execute("PRAGMA secure_delete = ON")  # a deleted conversation leaves the file too
                migrate(db, str(file))
            except BaseException:
                db.close()
                raise
        return cls(db, str(file), clock)

    def close(self) -> None:
        """Idempotent."""
        self._db.close()

    @property
    def db(self) -> sqlite3.Connection:
        """For the reading side (`chat.library`)."""
        return self._db

    # conversations

    def create(self, conversation: Conversation) -> Conversation:
        """Store a new conversation and return it with its id and times."""
        now = self.clock()
        row_id = self._write(
            "INSERT INTO conversation (title, model, system_prompt, sampling, draft, created_ms, "
            "updated_ms)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                conversation.title,
                conversation.model,
                conversation.system_prompt,
                _json(conversation.sampling),
                conversation.draft,
                now,
                now,
            ),
        )
        return msgspec.structs.replace(conversation, id=row_id, created_ms=now, updated_ms=now)

    def update(self, conversation_id: int, **fields: Any) -> None:
        """Set columns of a conversation: title, model, system_prompt, sampling, head_id, draft."""
        if "sampling" in fields:
            fields["sampling"] = _json(fields["sampling"])
        columns = "".join(f"{name} = ?, " for name in fields)
        touched = "" if set(fields) <= {"draft"} else f"updated_ms = {self.clock()}, "
        sets = (columns + touched).removesuffix(", ")
        self._write(f"UPDATE conversation SET {sets} WHERE id = ?", (*fields.values(), conversation_id))

    def conversation(self, conversation_id: int) -> Conversation:
        """Raises StoreError when there is none."""
        with speaking(self.name):
            row = self._db.execute(
                f"SELECT {_CONVERSATION} FROM conversation WHERE id = ? AND deleted_ms IS NULL",
                (conversation_id,),
            ).fetchone()
        if row is None:
            raise StoreError(
                f"there is no conversation {conversation_id}", hint="list them: `/sessions`"
            )
        return Conversation(
            id=row[0],
            title=row[1],
            model=row[2],
            system_prompt=row[3],
            sampling=msgspec.json.decode(row[4]),
            head_id=row[5],
            draft=row[6],
            created_ms=row[7],
            updated_ms=row[8],
        )

    def delete(self, conversation_id: int) -> None:
        """Hide it; `undelete` brings it back until it is purged, a day later."""
        self._write(
            "UPDATE conversation SET deleted_ms = ? WHERE id = ?", (self.clock(), conversation_id)
        )

    def undelete(self, conversation_id: int) -> None:
        """Bring a deleted conversation back. Raises StoreError when it has been purged."""
        with speaking(self.name):
            found = self._db.execute(
                "UPDATE conversation SET deleted_ms = NULL WHERE id = ?", (conversation_id,)
            ).rowcount
        if not found:
            raise StoreError(f"conversation {conversation_id} has been purged", hint="")

    # turns

    def add(self, turn: Turn) -> Turn:
        """Store a new turn, make it its conversation's head, and return it with its id and time."""
        now = self.clock()
        values = (
            turn.conversation_id,
            turn.parent_id,
            turn.role,
            turn.content,
            turn.reasoning,
            _json(turn.attachments),
            turn.status,
            turn.error,
            turn.model,
            _json(turn.stats),
            turn.cut_summary,
            now,
        )
        with self._transaction():
            row_id = self._db.execute(
                f"INSERT INTO turn ({_TURN.removeprefix('id, ')}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, "
                f"?, ?, ?)",
                values,
            ).lastrowid
            self._db.execute(
                "UPDATE conversation SET head_id = ?, updated_ms = ? WHERE id = ?",
                (row_id, now, turn.conversation_id),
            )
        return msgspec.structs.replace(turn, id=row_id or 0, created_ms=now)

    def turns(self, conversation_id: int) -> dict[int, Turn]:
        """Return all turns of a conversation by id, unfinished ones joined with their journal."""
        with speaking(self.name):
            rows = self._db.execute(
                f"SELECT {_TURN} FROM turn WHERE conversation_id = ? ORDER BY id", (conversation_id,)
            ).fetchall()
            found = {row[0]: _turn(row) for row in rows}
            for turn in [t for t in found.values() if t.status == "streaming"]:
                content, reasoning = self._journal(turn.id)
                found[turn.id] = msgspec.structs.replace(
                    turn,
                    content=turn.content + content,
                    reasoning=turn.reasoning + reasoning,
                    status="interrupted",
                )
        return found

    def reopen(self, turn_id: int) -> None:
        """Write on in a turn that had ended; what its journal holds is folded in first."""
        with self._transaction():
            self._fold(turn_id, "streaming")

    def append(self, turn_id: int, content: str, reasoning: str = "") -> None:
        """Add a piece of an answer being written (0.05 ms); nothing is shown before it returns."""
        self._write(
            "INSERT INTO journal (turn_id, content, reasoning, created_ms) VALUES (?, ?, ?, ?)",
            (turn_id, content, reasoning, self.clock()),
        )

    def finish(self, turn: Turn) -> None:
        """Write a turn's end (content, status, stats) and drop its journal in the same transaction."""
        with self._transaction():
            self._db.execute(
                "UPDATE turn SET content = ?, reasoning = ?, status = ?, error = ?, model = ?, stats = "
                "? WHERE id = ?",
                (
                    turn.content,
                    turn.reasoning,
                    turn.status,
                    turn.error,
                    turn.model,
                    _json(turn.stats),
                    turn.id,
                ),
            )
            self._db.execute("DELETE FROM journal WHERE turn_id = ?", (turn.id,))
            self._db.execute(
                "UPDATE conversation SET updated_ms = ? WHERE id = ?",
                (self.clock(), turn.conversation_id),
            )

    def cut(self, turn_id: int, summary: str | None) -> None:
        """Stop sending what precedes this turn; `summary` stands for it. None undoes the cut."""
        self._write("UPDATE turn SET cut_summary = ? WHERE id = ?", (summary, turn_id))

    def clean_up(self) -> int:
        """Fold answers that dead processes left behind; return how many."""
        now = self.clock()
        with self._transaction():
            rows = self._db.execute(
                "SELECT id FROM turn WHERE status = 'streaming' AND created_ms < :old AND NOT EXISTS"
                " (SELECT 1 FROM journal WHERE turn_id = turn.id AND created_ms >= :old)",
                {"old": now - STALE_MS},
            ).fetchall()
            for (turn_id,) in rows:
                self._fold(turn_id, "interrupted")
        return len(rows)

    def overdue(self) -> list[Conversation]:
        """Return what was deleted a day ago: ids alone."""
        with speaking(self.name):
            rows = self._db.execute(
                "SELECT id FROM conversation WHERE deleted_ms < ?", (self.clock() - UNDO_MS,)
            ).fetchall()
        return [Conversation(id=row[0]) for row in rows]

    def purge(self, deleted: Sequence[Conversation]) -> None:
        """Delete these for good, unless one was brought back meanwhile."""
        with self._transaction():
            self._db.executemany(
                "DELETE FROM conversation WHERE id = ? AND deleted_ms IS NOT NULL",
                [(conversation.id,) for conversation in deleted],
            )

    def _fold(self, turn_id: int, status: Status) -> None:
        content, reasoning = self._journal(turn_id)
        # the status first: leaving "streaming" indexes the text, and that must be the whole text
        self._db.execute("UPDATE turn SET status = 'streaming' WHERE id = ?", (turn_id,))
        self._db.execute(
            "UPDATE turn SET content = content || ?, reasoning = reasoning || ?, status = ? WHERE id = "
            "?",
            (content, reasoning, status, turn_id),
        )
        self._db.execute("DELETE FROM journal WHERE turn_id = ?", (turn_id,))

    def _journal(self, turn_id: int) -> tuple[str, str]:
        rows = self._db.execute(
            "SELECT content, reasoning FROM journal WHERE turn_id = ? ORDER BY id", (turn_id,)
        ).fetchall()
        return "".join(r[0] for r in rows), "".join(r[1] for r in rows)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with speaking(self.name):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _write(self, sql: str, values: tuple[object, ...]) -> int:
        with speaking(self.name):
            return self._db.execute(sql, values).lastrowid or 0


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _turn(row: tuple[Any, ...]) -> Turn:
    return Turn(
        id=row[0],
        conversation_id=row[1],
        parent_id=row[2],
        role=row[3],
        content=row[4],
        reasoning=row[5],
        attachments=msgspec.json.decode(row[6], type=tuple[Attachment, ...]),
        status=row[7],
        error=row[8],
        model=row[9],
        stats=msgspec.json.decode(row[10], type=Stats),
        cut_summary=row[11],
        created_ms=row[12],
    )


def purge_deleted(open_store: Callable[[], Store] | None = None) -> None:
    """Purge what can no longer be undone. What fails is left to the next purge.

    Blocks go first: a purge that is killed midway finds its conversations again.
    """
    if open_store is None and not store_path().exists():
        return
    with (
        contextlib.suppress(EdgeInferError, OSError),
        contextlib.closing((open_store or Store.open)()) as store,
    ):
        overdue = store.overdue()
        for conversation in overdue:
            forget_conversation(paths.blocks_dir(), conversation.owner)
        store.purge(overdue)
