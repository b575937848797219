"""Finding conversations again: the list, the search, the last one, and what was typed before."""

from __future__ import annotations

import re

from edgeinfer.chat.store import Store, speaking
from edgeinfer.chat.values import Summary

#: Put around found words in a snippet; neither can be in a stored text that a terminal shows.
MARK, UNMARK = "\x02", "\x03"

_COUNT = "(SELECT count(*) FROM turn WHERE turn.conversation_id = c.id)"
_WORD = re.compile(r"\w+", re.UNICODE)


def listing(store: Store, limit: int = 500) -> list[Summary]:
    """The conversations that hold a turn, newest first."""
    sql = (
        f"SELECT c.id, c.title, c.model, {_COUNT} AS turns, c.updated_ms, '' FROM conversation c"
        " WHERE c.deleted_ms IS NULL AND turns > 0 ORDER BY c.updated_ms DESC, c.id DESC LIMIT ?"
    )
    return _summaries(store, sql, (limit,))


def search(store: Store, words: str, limit: int = 100) -> list[Summary]:
    """Conversations whose turns or title hold all the words, the last one as a prefix; best first, one snippet each."""
    query = match_query(words)
    if not query:
        return listing(store, limit)
    sql = f"""
        WITH hit AS (
            SELECT t.conversation_id AS id, s.rowid AS turn_id, s.rank AS rank
            FROM turn_search s JOIN turn t ON t.id = s.rowid WHERE turn_search MATCH :query
            ORDER BY s.rank LIMIT 2000
        ), best AS (SELECT id, turn_id, min(rank) AS rank FROM hit GROUP BY id),
        named AS (SELECT rowid AS id FROM title_search WHERE title_search MATCH :query),
        every AS (SELECT id FROM best UNION SELECT id FROM named)
        SELECT c.id, c.title, c.model, {_COUNT} AS turns, c.updated_ms, coalesce(best.turn_id, 0)
        FROM every JOIN conversation c ON c.id = every.id LEFT JOIN best ON best.id = every.id
        WHERE c.deleted_ms IS NULL
        ORDER BY c.id IN (SELECT id FROM named) DESC, best.rank, c.updated_ms DESC LIMIT :limit"""
    with speaking(store.name):
        rows = store.db.execute(sql, {"query": query, "limit": limit}).fetchall()
        return [
            Summary(id=r[0], title=r[1], model=r[2], turns=r[3], updated_ms=r[4], snippet=_snippet(store, query, r[5]))
            for r in rows
        ]


def match_query(words: str) -> str:
    """What a person typed as an FTS5 expression: every word, the last as a prefix. "" when there is no word in it."""
    found = _WORD.findall(words)
    return " ".join(f'"{w}"' for w in found) + "*" if found else ""


def last(store: Store) -> int | None:
    """The conversation that was used last, for `--continue`."""
    found = listing(store, limit=1)
    return found[0].id if found else None


def typed(store: Store, limit: int = 200) -> list[str]:
    """What the user typed before, newest first, without repeats."""
    with speaking(store.name):
        rows = store.db.execute(
            "SELECT t.content FROM turn t JOIN conversation c ON c.id = t.conversation_id"
            " WHERE t.role = 'user' AND c.deleted_ms IS NULL ORDER BY t.id DESC LIMIT ?",
            (limit,),
        ).fetchall()
    return list(dict.fromkeys(r[0] for r in rows if r[0]))


def _snippet(store: Store, query: str, turn_id: int) -> str:
    if not turn_id:
        return ""
    row = store.db.execute(
        "SELECT snippet(turn_search, 0, ?, ?, '…', 12) FROM turn_search WHERE turn_search MATCH ? AND rowid = ?",
        (MARK, UNMARK, query, turn_id),
    ).fetchone()
    return " ".join(row[0].split()) if row else ""


def _summaries(store: Store, sql: str, values: tuple[object, ...]) -> list[Summary]:
    with speaking(store.name):
        return [
            Summary(id=r[0], title=r[1], model=r[2], turns=r[3], updated_ms=r[4], snippet=r[5])
            for r in store.db.execute(sql, values).fetchall()
        ]
