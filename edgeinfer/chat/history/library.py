"""Finding conversations again: the list, the search, the last one, and what was typed before."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from edgeinfer.chat.history.store import Store, speaking
from edgeinfer.chat.history.values import Summary

#: Put around found words in a snippet; neither can be in a stored text that a terminal shows.
MARK, UNMARK = "\x02", "\x03"

#: Turns that a search looks at, newest first.
HITS = 4000

_COUNT = "(SELECT count(*) FROM turn WHERE turn.conversation_id = c.id)"
_WORD = re.compile(r"\w+", re.UNICODE)


def listing(store: Store, limit: int = 500) -> list[Summary]:
    """The conversations that hold a turn, newest first."""
    sql = (
        f"SELECT c.id, c.title, c.model, {_COUNT} AS turns, c.updated_ms, '' FROM conversation c"
        " WHERE c.deleted_ms IS NULL AND turns > 0 ORDER BY c.updated_ms DESC, c.id DESC LIMIT ?"
    )
    return _summaries(store, sql, (limit,))


def search(store: Store, words: str, limit: int = 60) -> list[Summary]:
    """Return conversations with all the words, the last as a prefix: titles first, then the newest.

    One snippet each, from the newest turn that has them. Of a word in very many turns the newest `HITS`
    are looked at: ranking all of them would take a quarter of a second in 20,000 turns.
    """
    query = match_query(words)
    if not query:
        return listing(store, limit)
    sql = f"""
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
        SELECT c.id, c.title, c.model, {_COUNT} AS turns, c.updated_ms, coalesce(t.content, '')
        FROM shown c LEFT JOIN turn t ON t.id = c.turn_id
        ORDER BY c.named DESC, c.updated_ms DESC, c.id DESC
        """
    with speaking(store.name):
        rows = store.db.execute(sql, {"query": query, "limit": limit}).fetchall()
    wanted = _WORD.findall(words)
    return [
        Summary(
            id=r[0], title=r[1], model=r[2], turns=r[3], updated_ms=r[4], snippet=snippet(r[5], wanted)
        )
        for r in rows
    ]


def match_query(words: str) -> str:
    """Return the FTS5 expression of typed words, the last one as a prefix; "" for no words."""
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


def snippet(text: str, words: Sequence[str], around: int = 40) -> str:
    """Return the place in `text` where the first of `words` begins a word, the words marked."""
    plain = text if text.isascii() else "".join(unicodedata.normalize("NFD", c)[0] for c in text)
    bare = ("".join(unicodedata.normalize("NFD", c)[0] for c in w) for w in words)
    pattern = re.compile("|".join(rf"\b{re.escape(w)}\w*" for w in bare), re.IGNORECASE)
    first = pattern.search(plain)
    if first is None:
        return ""
    start, end = max(0, first.start() - around), min(len(text), first.end() + around)
    while 0 < start < first.start() and not text[start - 1].isspace():
        start += 1
    parts, at = ["…" if start else ""], start
    for found in pattern.finditer(plain, start, end):
        parts += [text[at : found.start()], MARK, text[found.start() : found.end()], UNMARK]
        at = found.end()
    parts += [text[at:end], "…" if end < len(text) else ""]
    return " ".join("".join(parts).split())


def _summaries(store: Store, sql: str, values: tuple[object, ...]) -> list[Summary]:
    with speaking(store.name):
        return [
            Summary(id=r[0], title=r[1], model=r[2], turns=r[3], updated_ms=r[4], snippet=r[5])
            for r in store.db.execute(sql, values).fetchall()
        ]
