"""The user's conversations in one SQLite file. A method returns after its write is committed.

The text of a streaming answer is written to a journal, a table of pieces, so that shown text survives
`kill -9`. When the answer ends, the journal is moved into the turn. Readers get both in one turn.
An unfinished turn is "streaming" while a process has the conversation locked, otherwise "interrupted".
A store is for one thread; several processes may open the file (write-ahead log).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from edgeinfer.chat.history import database, lease
from edgeinfer.chat.history.database import store_errors
from edgeinfer.chat.history.lease import Lease
from edgeinfer.chat.history.values import Attachment, Conversation, Stats, Status, Summary, Turn
from edgeinfer.errors import EdgeInferError, StoreError, UsageError
from edgeinfer.platform import paths
from edgeinfer.platform.disk import path_errors
from edgeinfer.runtime.prefix_cache.retention import forget_conversations
from edgeinfer.tools.tool_use import ToolUse

_log = logging.getLogger("edgeinfer.chat")
#: Time (ms) without new text after which `clean_up` checks whether an answer's process has ended.
STALE_MS = 60_000

#: How long (ms) deleted conversations are kept, for undo.
UNDO_MS = 24 * 3600 * 1000

#: Marks around matched words in a snippet: control characters, which shown text does not contain.
MARK, UNMARK = "\x02", "\x03"

#: Maximum number of turns with the searched words that a search examines, the newest first.
HITS = 4000

_COUNT = "(SELECT count(*) FROM turn t WHERE t.conversation_id = c.id AND t.role = 'user')"
_WORD = re.compile(r"\w+", re.UNICODE)
_SEARCH = f"""
    WITH hit AS (
        SELECT rowid AS turn_id FROM turn_search
        WHERE turn_search MATCH :query ORDER BY rowid DESC LIMIT {HITS}
    ),
    found AS MATERIALIZED (
        SELECT t.conversation_id AS id, max(hit.turn_id) AS turn_id
        FROM hit JOIN turn t ON t.id = hit.turn_id GROUP BY 1
    ),
    named AS MATERIALIZED (SELECT rowid AS id FROM title_search WHERE title_search MATCH :query),
    every AS (SELECT id FROM found UNION SELECT id FROM named),
    shown AS MATERIALIZED (
        SELECT c.id, c.title, c.model, c.updated_ms, coalesce(found.turn_id, 0) AS turn_id,
            c.id IN named AS named
        FROM every JOIN conversation c ON c.id = every.id LEFT JOIN found ON found.id = every.id
        WHERE c.deleted_ms IS NULL ORDER BY named DESC, c.updated_ms DESC, c.id DESC LIMIT :limit
    )
    SELECT c.id, c.title, c.model, {_COUNT} AS turns, c.updated_ms, c.turn_id FROM shown c
    ORDER BY c.named DESC, c.updated_ms DESC, c.id DESC
    """
#: SQL for the snippets of turns. The `+` makes SQLite search the full-text index once, not for each
#: turn.
_SNIPPETS = f"""
    SELECT rowid, snippet(turn_search, 0, '{MARK}', '{UNMARK}', '…', 16) FROM turn_search
    WHERE turn_search MATCH ? AND +rowid IN (SELECT value FROM json_each(?))
    """

T = TypeVar("T", bound=msgspec.Struct)

#: Columns that contain JSON, and the type of each decoded value.
_JSON: dict[str, Any] = {
    "attachments": tuple[Attachment, ...],
    "calls": tuple[ToolUse, ...],
    "stats": Stats,
    "sampling": dict[str, float | int | None],
}
_TURN = ", ".join(Turn.__struct_fields__)
_CONVERSATION = ", ".join(Conversation.__struct_fields__)


def store_path() -> Path:
    return paths.data_dir() / "conversations.db"


def now_ms() -> int:
    """Return the time (ms since 1970)."""
    return int(time.time() * 1000)


class ConversationStore:
    """Reads and writes conversations. `open` and `memory_store` return a store.

    `name` is the path of the file, "" in memory. `clock` returns milliseconds since 1970.
    """

    def __init__(self, db: sqlite3.Connection, name: str, clock: Callable[[], int] = now_ms) -> None:
        self.db = db
        self.name = name
        self.clock = clock

    @classmethod
    def open(cls, path: Path | None = None, clock: Callable[[], int] = now_ms) -> ConversationStore:
        """Open or create the file (mode 0600), and migrate it to the newest schema. Raises StoreError.

        If `path` is None, the file is `store_path()`.
        """
        file = path or store_path()
        with (
            path_errors(file, "check the directory, or set XDG_DATA_HOME", StoreError),
            contextlib.suppress(FileExistsError),
        ):
            paths.make_folder(file.parent)
            # O_EXCL, because closing a descriptor of an existing database drops this process's locks on
            # it. Another process would then believe to be the last user, and delete the WAL file.
            os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with store_errors(str(file)):
            db = database.connect(str(file))
            try:
                db.execute("PRAGMA journal_mode = WAL")
                # a killed process loses nothing; a power cut loses the last transactions
                db.execute("PRAGMA synchronous = NORMAL")
                database.migrate(db, str(file))
                db.execute("PRAGMA foreign_keys = ON")
                db.text_factory = lambda raw: raw.decode("utf-8", "replace")
            except BaseException:
                db.close()
                raise
        return cls(db, str(file), clock)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self.db.close()

    def create(self, conversation: Conversation) -> Conversation:
        """Store a new conversation and return it with its id and times."""
        now = self.clock()
        new = msgspec.structs.replace(conversation, head_id=None, created_ms=now, updated_ms=now)
        with self._transaction():
            return msgspec.structs.replace(new, id=self._insert("conversation", new))

    def update(self, conversation_id: int, **fields: Any) -> None:
        """Set columns of a conversation, e.g. its title, model or sampling."""
        if set(fields) - {"draft"}:
            fields["updated_ms"] = self.clock()
        self._set("conversation", conversation_id, fields)

    def conversation(self, conversation_id: int) -> Conversation:
        """Return a conversation. Raises StoreError if there is none."""
        sql = f"SELECT {_CONVERSATION} FROM conversation WHERE id = ? AND deleted_ms IS NULL"
        for row in self._rows(sql, conversation_id):
            return _read(Conversation, row)
        raise StoreError(
            f"there is no conversation with the number {conversation_id}",
            hint="`/sessions` lists all conversations",
        )

    def delete(self, conversation_id: int) -> None:
        """Hide a conversation, which `undelete` can restore until `purge` deletes it, a day later."""
        self._set("conversation", conversation_id, {"deleted_ms": self.clock()})

    def undelete(self, conversation_id: int) -> None:
        """Restore a deleted conversation. Raises StoreError if it has been purged."""
        with store_errors(self.name):
            sql = "UPDATE conversation SET deleted_ms = NULL WHERE id = ?"
            n_restored = self.db.execute(sql, (conversation_id,)).rowcount
        if not n_restored:
            problem = f"conversation {conversation_id} was deleted more than a day ago"
            raise StoreError(problem, hint="`/undo` restores a conversation only within a day")

    def add(self, turn: Turn) -> Turn:
        """Store a new turn as the last one of the open branch; return it with its id and time."""
        new = msgspec.structs.replace(turn, created_ms=self.clock())
        with self._transaction():
            new = msgspec.structs.replace(new, id=self._insert("turn", new))
            head = {"head_id": new.id, "updated_ms": new.created_ms}
            self._set("conversation", new.conversation_id, head)
        return new

    def turns(self, conversation_id: int) -> dict[int, Turn]:
        """Return all turns of a conversation by id; unfinished answers have their text so far."""
        sql = f"SELECT {_TURN} FROM turn WHERE conversation_id = ? ORDER BY id"
        turns = {row[0]: _read(Turn, row) for row in self._rows(sql, conversation_id)}
        # a process can be writing only the last turn of the open branch. Other turns with the status
        # "streaming" were interrupted
        head = self._rows("SELECT head_id FROM conversation WHERE id = ?", conversation_id)
        live_id = head[0][0] if head and self.is_answering(conversation_id) else 0
        for turn in [turn for turn in turns.values() if turn.status == "streaming"]:
            content, reasoning = self._journal(turn.id)
            turns[turn.id] = msgspec.structs.replace(
                turn,
                content=turn.content + content,
                reasoning=turn.reasoning + reasoning,
                status="streaming" if turn.id == live_id else "interrupted",
            )
        return turns

    def acquire(self, conversation_id: int) -> Lease:
        """Lock a conversation to write an answer.

        Raises UsageError if it is already locked, StoreError if the lock file cannot be opened.
        """
        with path_errors(self._leases or "", "check the directory", StoreError):
            acquired = lease.acquire(self._leases, conversation_id)
        if acquired is None:
            raise other_writer_error()
        return acquired

    def is_answering(self, conversation_id: int) -> bool:
        """Return whether a process has locked this conversation to write an answer."""
        return lease.is_held(self._leases, conversation_id)

    @property
    def _leases(self) -> Path | None:
        return Path(self.name).with_suffix(".leases") if self.name else None

    def reopen(self, turn_id: int) -> None:
        """Set an ended answer's status to "streaming", because the model will continue the answer."""
        with self._transaction():
            self._fold(turn_id, "streaming")
            # the ids of the answer's new pieces begin at 1 again. The new time makes other processes
            # read this answer again from its first piece
            self.db.execute(
                "UPDATE conversation SET updated_ms = ? WHERE id ="
                " (SELECT conversation_id FROM turn WHERE id = ?)",
                (self.clock(), turn_id),
            )

    def append(self, turn_id: int, content: str, reasoning: str = "") -> None:
        """Store a piece of a streaming answer (0.05 ms), so that shown text survives `kill -9`."""
        with store_errors(self.name):
            self.db.execute(
                "INSERT INTO journal (turn_id, content, reasoning, created_ms) VALUES (?, ?, ?, ?)",
                (turn_id, content, reasoning, self.clock()),
            )

    def finish(self, turn: Turn) -> None:
        """Store an ended answer (content, status, stats), and delete its separately stored pieces."""
        with self._transaction():
            names = ("content", "reasoning", "calls", "status", "error", "model", "stats")
            self._set("turn", turn.id, {name: getattr(turn, name) for name in names})
            self.db.execute("DELETE FROM journal WHERE turn_id = ?", (turn.id,))
            self._set("conversation", turn.conversation_id, {"updated_ms": self.clock()})

    def update_turn(self, turn_id: int, **fields: Any) -> None:
        """Set columns of a turn, e.g. its `calls` or `cut_summary`."""
        self._set("turn", turn_id, fields)

    def clean_up(self) -> int:
        """Mark unfinished answers as interrupted if their process has ended; return how many."""
        now = self.clock()
        with self._transaction():
            rows = self.db.execute(
                "SELECT id, conversation_id FROM turn WHERE status = 'streaming' AND created_ms < :old"
                " AND NOT EXISTS"
                " (SELECT 1 FROM journal WHERE turn_id = turn.id AND created_ms >= :old)",
                {"old": now - STALE_MS},
            ).fetchall()
            dead = [turn_id for turn_id, owner in rows if not self.is_answering(owner)]
            for turn_id in dead:
                self._fold(turn_id, "interrupted")
        return len(dead)

    def overdue(self) -> list[Conversation]:
        """Return the conversations that were deleted more than a day ago; only `id` is set."""
        rows = self._rows("SELECT id FROM conversation WHERE deleted_ms < ?", self.clock() - UNDO_MS)
        return [Conversation(id=row[0]) for row in rows]

    def purge(self, deleted: Sequence[Conversation]) -> None:
        """Delete conversations for good, in copies too, unless restored. Raises StoreError."""
        ids = [conversation.id for conversation in deleted]
        with self._transaction():
            database.delete_rows(self.db, ids, "AND deleted_ms IS NOT NULL")
        purged = [n for n in ids if not self._rows("SELECT 1 FROM conversation WHERE id = ?", n)]
        database.clean_copies(self.name, purged)

    def change_count(self) -> tuple[int, int]:
        """Return a value that changes at each write to the file by any process; takes only 6 µs."""
        with store_errors(self.name):
            return self.db.execute("PRAGMA data_version").fetchone()[0], self.db.total_changes

    def newest_change(self) -> tuple[int, int]:
        """Return a value that changes when a conversation is added, changed or deleted.

        Unlike `change_count`, the value stays the same while text is appended to an answer.
        """
        sql = "SELECT max(updated_ms), count(*) FROM conversation WHERE deleted_ms IS NULL"
        ((newest, number),) = self._rows(sql)
        return newest or 0, number

    def conversation_version(self, conversation_id: int) -> tuple[Any, ...] | None:
        """Return a value that changes with each write to a conversation; None if it is deleted.

        Only text that is appended to a streaming answer does not change the value.
        """
        rows = self._rows(
            "SELECT c.updated_ms, c.head_id, c.title, t.status FROM conversation c"
            " LEFT JOIN turn t ON t.id = c.head_id WHERE c.id = ? AND c.deleted_ms IS NULL",
            conversation_id,
        )
        return (*rows[0], self.is_answering(conversation_id)) if rows else None

    def pieces(self, turn_id: int, after: int) -> list[tuple[int, str, str]]:
        """Return the pieces (id, content, reasoning) of a streaming answer with an id above `after`."""
        sql = "SELECT id, content, reasoning FROM journal WHERE turn_id = ? AND id > ? ORDER BY id"
        return self._rows(sql, turn_id, after)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Let the `with` block read one consistent state of the file (in a read transaction)."""
        with store_errors(self.name):
            self.db.execute("BEGIN")
            try:
                yield
            finally:
                self.db.execute("COMMIT")

    def listing(self, limit: int = 500) -> list[Summary]:
        """Return summaries of the conversations that have turns, newest first."""
        sql = (
            f"SELECT c.id, c.title, c.model, {_COUNT} AS turns, c.updated_ms FROM conversation c"
            " WHERE c.deleted_ms IS NULL AND turns > 0 ORDER BY c.updated_ms DESC, c.id DESC LIMIT ?"
        )
        return [Summary(*row) for row in self._rows(sql, limit)]

    def search(self, query_text: str, limit: int = 60) -> list[Summary]:
        """Return summaries of the conversations that contain all words of `query_text`.

        The last word may be a prefix. Conversations with the words in their title come first, then the
        newest ones. Each snippet is from the newest turn with the words. Only the newest `HITS` turns
        with the words are examined, because ranking all turns would take a quarter of a second for a
        frequent word in 20,000 turns.
        """
        query = match_query(query_text)
        if not query:
            return self.listing(limit)
        with store_errors(self.name):
            rows = self.db.execute(_SEARCH, {"query": query, "limit": limit}).fetchall()
            turn_ids = msgspec.json.encode([row[5] for row in rows]).decode()
            snippets = dict(self.db.execute(_SNIPPETS, (query, turn_ids)))
        texts = (" ".join(snippets.get(row[5], "").split()) for row in rows)
        return [Summary(*(*row[:5], text)) for row, text in zip(rows, texts, strict=True)]

    def past_questions(self, limit: int = 200) -> list[str]:
        """Return the texts of earlier questions, newest first, without repetitions."""
        rows = self._rows(
            "SELECT t.content FROM turn t JOIN conversation c ON c.id = t.conversation_id"
            " WHERE t.role = 'user' AND c.deleted_ms IS NULL ORDER BY t.id DESC LIMIT ?",
            limit,
        )
        return list(dict.fromkeys(row[0] for row in rows if row[0]))

    def _rows(self, sql: str, *values: object) -> list[Any]:
        with store_errors(self.name):
            return self.db.execute(sql, values).fetchall()

    def _fold(self, turn_id: int, status: Status) -> None:
        content, reasoning = self._journal(turn_id)
        # set "streaming" first: this makes a trigger remove the old text from the search index. The
        # next change of the status makes another trigger add the new text
        self._set("turn", turn_id, {"status": "streaming"})
        sql = "UPDATE turn SET content = content||?, reasoning = reasoning||?, status = ? WHERE id = ?"
        self.db.execute(sql, (content, reasoning, status, turn_id))
        self.db.execute("DELETE FROM journal WHERE turn_id = ?", (turn_id,))

    def _journal(self, turn_id: int) -> tuple[str, str]:
        rows = self.pieces(turn_id, 0)
        return "".join(row[1] for row in rows), "".join(row[2] for row in rows)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with store_errors(self.name):
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.db.execute("COMMIT")
            except BaseException:
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")
                raise

    def _insert(self, table: str, new: Turn | Conversation) -> int:
        names = [name for name in new.__struct_fields__ if name != "id"]
        values = [_column(name, getattr(new, name)) for name in names]
        marks = ", ".join("?" * len(names))
        sql = f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks})"
        return self.db.execute(sql, values).lastrowid or 0

    def _set(self, table: str, row_id: int, fields: dict[str, Any]) -> None:
        columns = ", ".join(f"{name} = ?" for name in fields)
        values = [_column(name, value) for name, value in fields.items()]
        with store_errors(self.name):
            self.db.execute(f"UPDATE {table} SET {columns} WHERE id = ?", (*values, row_id))


def other_writer_error() -> UsageError:
    """Return the error for a conversation to which another process is writing."""
    message = "an answer to this conversation is being written elsewhere"
    return UsageError(message, hint="wait until the answer ends, or stop it there")


def _column(name: str, value: object) -> object:
    return msgspec.json.encode(value).decode() if name in _JSON else value


def _read(kind: type[T], row: Sequence[Any]) -> T:
    values = dict(zip(kind.__struct_fields__, row, strict=True))
    for name in values.keys() & _JSON.keys():
        try:
            values[name] = msgspec.json.decode(values[name], type=_JSON[name])
        except msgspec.MsgspecError as error:  # leave out only the damaged value
            _log.warning("%s %s: %s cannot be read: %s", kind.__name__, row[0], name, error)
            del values[name]
    return kind(**values)


def match_query(text: str) -> str:
    """Return an SQLite full-text query for words of `text`, the last one a prefix; "" for no words."""
    terms = _WORD.findall(text)
    return " ".join(f'"{w}"' for w in terms) + "*" if terms else ""


def purge_deleted(open_store: Callable[[], ConversationStore] | None = None) -> None:
    """Delete conversations for good that the user deleted over a day ago, and their cached prefixes.

    Errors are ignored, because the next purge tries again. Cached prefixes are deleted first: if the
    process is killed after that, the next purge still finds the conversations. Without `open_store`,
    the default file is purged, but only if it already has this version's schema.
    """
    if open_store is None and not database.is_current(store_path()):
        return
    with (
        contextlib.suppress(EdgeInferError, OSError),
        contextlib.closing((open_store or ConversationStore.open)()) as store,
    ):
        overdue = store.overdue()
        if overdue:
            owners = (conversation.owner for conversation in overdue)
            forget_conversations(paths.blocks_dir(), *owners)
        store.purge(overdue)


def memory_store() -> ConversationStore:
    """Return a store in memory, which is lost when the process ends."""
    db = database.connect(":memory:")
    database.migrate(db, "memory")
    return ConversationStore(db, "")
