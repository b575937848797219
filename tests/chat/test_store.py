"""The store: what is committed, what a killed process leaves, and what a search finds."""

import contextlib
import io
import os
import sqlite3
import subprocess
import sys
import threading

import pytest
from fake_engine import FakeEngine
from fixed_chat import FixedHost, make_app, make_setup, words
from fixed_chat import wait_until as wait_shown
from made_models import make_llama
from msgspec.structs import replace
from other_processes import wait_until

from edgeinfer.chat.history import database
from edgeinfer.chat.history import store as store_module
from edgeinfer.chat.history.database import migrate, migrations
from edgeinfer.chat.history.store import (
    MARK,
    STALE_MS,
    UNDO_MS,
    UNMARK,
    ConversationStore,
    purge_deleted,
    store_path,
)
from edgeinfer.chat.history.values import Attachment, Conversation, Stats, Turn
from edgeinfer.chat.repl import Repl
from edgeinfer.cli.main import main
from edgeinfer.errors import StoreError
from edgeinfer.platform import paths
from edgeinfer.runtime.prefix_cache import retention
from edgeinfer.runtime.prefix_cache.block_folder import BlockStore
from edgeinfer.runtime.prefix_cache.kv_block import Header, KvBlock, pack_tokens
from edgeinfer.runtime.sequence_state import as_state


@pytest.fixture
def clock():
    class Clock:
        now = 1_000_000_000

        def __call__(self):
            self.now += 1
            return self.now

    return Clock()


@pytest.fixture
def store(store, clock):
    store.clock = clock
    return store


def talk(store, *texts, title="A title"):
    """Store a conversation of alternating turns; return its id."""
    conversation = store.create(Conversation(title=title, model="m"))
    parent = None
    for index, text in enumerate(texts):
        role = "assistant" if index % 2 else "user"
        branch = {"conversation_id": conversation.id, "parent_id": parent}
        parent = store.add(Turn(role=role, content=text, **branch)).id
    return conversation.id


def begin_answer(store, conversation):
    """Store a streaming answer; return its turn."""
    return store.add(Turn(conversation_id=conversation, role="assistant", status="streaming"))


def test_turn_is_read_as_it_was_stored(store):
    fields = {"title": "t", "model": "m", "system_prompt": "s", "draft": "d"}
    conversation = store.create(Conversation(**fields, sampling={"top_k": 3}))
    turn = Turn(
        conversation_id=conversation.id,
        content="Grüße\n\x1b[0m",
        reasoning="hm",
        attachments=(Attachment(name="a.txt", text="x", tokens=1),),
        stats=Stats(prompt_tokens=3, ttft_ms=1.5),
        cut_summary="",
    )
    stored = store.add(turn)
    assert store.turns(conversation.id) == {stored.id: stored}
    assert replace(stored, id=0, created_ms=0) == turn
    read = store.conversation(conversation.id)
    assert (read.title, read.system_prompt, read.draft, read.head_id) == ("t", "s", "d", stored.id)
    assert read.sampling == {"top_k": 3}


def test_file_belongs_to_its_user_alone(store, tmp_path):
    assert os.stat(tmp_path / "c.db").st_mode & 0o777 == 0o600


def test_journal_is_read_after_the_process_died(store):
    conversation = talk(store, "q")
    answer = begin_answer(store, conversation)
    store.append(answer.id, "Hel", "thin")
    store.append(answer.id, "lo", "king")
    read = store.turns(conversation)[answer.id]
    assert (read.content, read.reasoning, read.status) == ("Hello", "thinking", "interrupted")


def test_finish_folds_the_journal_and_indexes_the_text(store):
    conversation = talk(store, "q")
    answer = begin_answer(store, conversation)
    store.append(answer.id, "zebra")
    assert store.search("zebra") == []
    store.finish(replace(answer, content="zebra stripes", status="complete"))
    assert store.turns(conversation)[answer.id].content == "zebra stripes"
    assert [s.id for s in store.search("zebra")] == [conversation]
    assert store.db.execute("SELECT count(*) FROM journal").fetchone() == (0,)


def test_reopen_unindexes_until_it_ends_again(store):
    conversation = talk(store, "q", "first part")
    head = store.conversation(conversation).head_id
    store.reopen(head)
    store.append(head, " and second")
    assert store.search("part") == []
    turn = store.turns(conversation)[head]
    assert turn.content == "first part and second"
    store.finish(replace(turn, status="complete"))
    assert len(store.search("second")) == 1
    store.db.execute("INSERT INTO turn_search(turn_search) VALUES ('integrity-check')")


def test_clean_up_folds_journals_of_dead_processes_alone(store, clock):
    conversation = talk(store, "q")
    dead = begin_answer(store, conversation)
    store.append(dead.id, "said before it died")
    clock.now += STALE_MS + 10
    alive = begin_answer(store, conversation)
    store.append(alive.id, "still at it")
    assert store.clean_up() == 1
    rows = dict(store.db.execute("SELECT id, status FROM turn WHERE role = 'assistant'").fetchall())
    assert rows == {dead.id: "interrupted", alive.id: "streaming"}
    assert len(store.search("died")) == 1
    store.append(alive.id, ", yes")
    assert store.turns(conversation)[alive.id].content == "still at it, yes"


def test_deleted_conversation_can_be_restored_until_it_is_purged(store, clock):
    conversation = talk(store, "secret words", "yes")
    store.delete(conversation)
    assert store.listing() == []
    assert store.search("secret") == []
    with pytest.raises(StoreError):
        store.conversation(conversation)
    store.undelete(conversation)
    assert [s.id for s in store.listing()] == [conversation]
    store.delete(conversation)
    clock.now += UNDO_MS + 10
    assert [c.id for c in store.overdue()] == [conversation]
    store.purge(store.overdue())
    assert store.overdue() == []
    with pytest.raises(StoreError):
        store.undelete(conversation)
    store.db.execute("INSERT INTO turn_search(turn_search) VALUES ('integrity-check')")


def test_search_finds_words_prefixes_accents_and_titles(store):
    first = talk(store, "How do I cook a soufflé?", "Whip the egg whites until stiff.", title="Cooking")
    monads = ("What is a monad?", "A monoid in the category of endofunctors.")
    second = talk(store, *monads, title="Category theory")
    assert [s.id for s in store.search("souffle")] == [first]
    assert [s.id for s in store.search("endofun")] == [second]
    assert [s.id for s in store.search("egg whites")] == [first]
    assert [s.id for s in store.search("categ")] == [second]
    assert store.search("egg monad") == []
    assert store.search('"; DROP TABLE turn; --') == []
    assert len(store.search('"')) == 2
    snippet = store.search("whites")[0].snippet
    assert f"{MARK}whites{UNMARK}" in snippet


def test_rename_moves_the_title_in_the_index(store):
    conversation = talk(store, "x", title="Before")
    store.update(conversation, title="After")
    assert store.search("before") == []
    assert [s.title for s in store.search("after")] == ["After"]


def test_list_is_newest_first_and_leaves_out_the_empty(store):
    first, second = talk(store, "a"), talk(store, "b")
    store.create(Conversation(title="empty"))
    assert [s.id for s in store.listing()] == [second, first]
    store.update(first, head_id=1)
    assert [s.id for s in store.listing()] == [first, second]
    assert [s.turns for s in store.listing()] == [1, 1]


def test_past_questions_are_newest_first_without_repeats(store):
    talk(store, "a", "x", "b", "y", "a")
    assert store.past_questions() == ["a", "b"]


def test_two_processes_may_write(store, tmp_path, clock):
    other = ConversationStore.open(tmp_path / "c.db", clock)
    conversation = talk(store, "from one")
    other.add(Turn(conversation_id=conversation, content="from the other"))
    assert [t.content for t in store.turns(conversation).values()] == ["from one", "from the other"]
    other.close()


def test_process_that_closes_the_store_leaves_the_log_of_another(store, tmp_path):
    path = tmp_path / "c.db"
    store.listing()
    again = ConversationStore.open(path)
    script = f"import sqlite3; db = sqlite3.connect({str(path)!r}); db.execute('PRAGMA user_version'); db.close()"
    subprocess.run([sys.executable, "-c", script], check=True)
    again.close()
    conversation = store.create(Conversation(title="kept"))
    other = ConversationStore.open(path)
    assert other.conversation(conversation.id).title == "kept"
    other.close()


def test_locked_store_says_so(store, tmp_path):
    holder = sqlite3.connect(tmp_path / "c.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    store.db.execute("PRAGMA busy_timeout = 1")
    with pytest.raises(StoreError, match="locked") as caught:
        talk(store, "x")
    assert "another edgeinfer" in caught.value.hint
    holder.close()


def test_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "c.db").write_bytes(b"not a database at all, just some text" * 100)
    with pytest.raises(StoreError):
        ConversationStore.open(tmp_path / "c.db")


def test_every_migration_step_leads_to_the_same_schema(tmp_path):
    scripts = migrations()
    whole = sqlite3.connect(":memory:", isolation_level=None)
    migrate(whole, "whole")
    stepped = sqlite3.connect(":memory:", isolation_level=None)
    for count in range(1, len(scripts) + 1):
        assert migrate(stepped, "stepped", scripts[:count]) == count
        stepped.execute("INSERT INTO conversation (created_ms, updated_ms) VALUES (1, 1)")
        stepped.execute(
            "INSERT INTO turn (conversation_id, role, content, status, created_ms)"
            " VALUES (1, 'user', 'w', 'complete', 1)"
        )
    schema = "SELECT type, name, sql FROM sqlite_master ORDER BY name"
    assert stepped.execute(schema).fetchall() == whole.execute(schema).fetchall()
    matches = stepped.execute("SELECT count(*) FROM turn_search WHERE turn_search MATCH 'w'")
    assert matches.fetchone() == (len(scripts),)
    whole.close()
    stepped.close()


def test_migration_that_fails_changes_nothing(tmp_path):
    good = migrations()[0]
    bad = tmp_path / "0002_bad.sql"
    bad.write_text("CREATE TABLE extra (x);\nCREATE TABLE extra (x);\n")
    db = sqlite3.connect(tmp_path / "c.db", isolation_level=None)
    with pytest.raises(sqlite3.OperationalError):
        migrate(db, "c", [good, bad])
    assert db.execute("PRAGMA user_version").fetchone() == (0,)
    assert db.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    db.close()


def store_of_schema(path, version):
    """Write a file with the schema of `version`, with two conversations."""
    path.touch(0o600)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        migrate(db, "", migrations()[:version])
        for n, title in ((3, "zebras"), (7, "okapis")):
            columns = "id, title, created_ms, updated_ms"
            db.execute(f"INSERT INTO conversation ({columns}) VALUES (?, ?, ?, ?)", (n, title, n, n))
            db.execute(
                "INSERT INTO turn (id, conversation_id, role, content, status, created_ms)"
                " VALUES (?, ?, 'user', ?, 'complete', 1)",
                (n * 10, n, f"about {title}"),
            )
            db.execute("UPDATE conversation SET head_id = ? WHERE id = ?", (n * 10, n))


def test_a_journal_next_to_a_copy_does_not_stop_the_purge_of_the_copies(tmp_path):
    path = tmp_path / "c.db"
    store_of_schema(path, 2)
    with contextlib.closing(ConversationStore.open(path)) as store:
        (copy,) = tmp_path.glob("c.db.schema-*")
        copy.rename(tmp_path / "c.db.schema-3")  # a killed purge of a copy has left its journal
        (tmp_path / "c.db.schema-2-journal").write_bytes(b"")
        store.delete(3)
        store.purge([Conversation(id=3)])
    assert b"zebras" not in (tmp_path / "c.db.schema-3").read_bytes()


@pytest.mark.parametrize("version", range(1, len(migrations())))
def test_a_store_of_an_older_version_is_kept_whole_and_copied(tmp_path, version):
    path = tmp_path / "c.db"
    store_of_schema(path, version)
    with contextlib.closing(ConversationStore.open(path)) as store:
        assert [s.title for s in store.listing()] == ["okapis", "zebras"]
        assert store.turns(7)[70].content == "about okapis"
        assert version == 1 or [s.id for s in store.search("zebras")] == [3]
        assert store.create(Conversation()).id == 8
        store.delete(3)
        store.purge([Conversation(id=3)])
        assert store.turns(3) == {}, "turns go with their conversation"
        store.db.execute("INSERT INTO turn_search(turn_search) VALUES ('integrity-check')")
    (copy,) = tmp_path.glob("c.db.schema-*")
    assert copy.name == f"c.db.schema-{version}"
    assert copy.stat().st_mode & 0o777 == 0o600
    with contextlib.closing(sqlite3.connect(copy)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (version,)
        assert db.execute("SELECT content FROM turn").fetchall() == [("about okapis",)]
    assert b"zebras" not in copy.read_bytes()


def test_old_and_unfinished_copies_are_deleted(tmp_path):
    path = tmp_path / "c.db"
    store_of_schema(path, 2)
    with contextlib.closing(ConversationStore.open(path)) as store:
        (copy,) = tmp_path.glob("c.db.schema-*")
        store.purge([])
        assert copy.exists()
        unfinished = tmp_path / f"c.db.{'0' * 16}.new"
        unfinished.write_bytes(b"")
        store.purge([])
        assert unfinished.exists(), "another process writes it now"
        for path in (copy, unfinished):
            os.utime(path, (0, 0))
        store.purge([])
        assert not copy.exists()
        assert not unfinished.exists()


def test_a_newer_store_is_refused_and_the_copy_named(tmp_path, monkeypatch):
    path = tmp_path / "a user's data" / "c.db"
    path.parent.mkdir()
    store_of_schema(path, 3)
    ConversationStore.open(path).close()
    older = migrations()[:3]
    monkeypatch.setattr(database, "migrations", lambda: older)
    with pytest.raises(StoreError, match="newer edgeinfer") as refused:
        ConversationStore.open(path)
    subprocess.run(refused.value.hint.partition("migration: ")[2], shell=True, check=True)
    with contextlib.closing(ConversationStore.open(path)) as store:
        assert store.turns(3)[30].content == "about zebras"


def test_processes_that_migrate_at_once_lose_nothing(tmp_path):
    path = tmp_path / "c.db"
    store_of_schema(path, 1)
    code = f"""
from pathlib import Path
from edgeinfer.chat.history.store import Conversation, ConversationStore
store = ConversationStore.open(Path({str(path)!r}))
for _ in range(5):
    print(store.create(Conversation()).id)
"""
    command = [sys.executable, "-c", code]
    openers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    ids = [line for opener in openers for line in opener.communicate(timeout=120)[0].split()]
    assert sorted(map(int, ids)) == list(range(8, 23))
    with contextlib.closing(sqlite3.connect(tmp_path / "c.db.schema-1")) as copy:
        assert copy.execute("PRAGMA user_version").fetchone() == (1,)
    with contextlib.closing(ConversationStore.open(path)) as store:
        assert store.turns(3)[30].content == "about zebras"


def test_a_copy_of_a_file_that_another_process_migrated_is_dropped(tmp_path, monkeypatch):
    path = tmp_path / "c.db"
    store_of_schema(path, 1)
    copy = database._copy

    def copy_late(db, name, version):
        monkeypatch.setattr(database, "_copy", copy)
        ConversationStore.open(path).close()
        copy(db, name, version)

    monkeypatch.setattr(database, "_copy", copy_late)
    ConversationStore.open(path).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "c.db.schema-1")) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
    assert list(tmp_path.glob("*.new*")) == []


def test_a_disk_too_full_for_the_copy_leaves_the_store_as_it_was(small_disk):
    path = small_disk / "c.db"
    store_of_schema(path, 2)
    before = path.read_bytes()
    with open(small_disk / "fill", "wb", buffering=0) as fill, contextlib.suppress(OSError):
        while fill.write(bytes(4096)):
            continue
    with pytest.raises(StoreError) as refused:
        ConversationStore.open(path)
    assert refused.value.hint.startswith("free some disk space")
    assert path.read_bytes() == before
    (small_disk / "fill").unlink()
    assert {path.name for path in small_disk.iterdir()} <= {"c.db", "c.db-wal", "c.db-shm"}
    with contextlib.closing(ConversationStore.open(path)) as store:
        assert store.turns(3)[30].content == "about zebras"


def test_a_conversations_id_is_never_given_again(store, tmp_path):
    ids = [store.create(Conversation()).id for _ in range(3)]
    for gone in reversed(ids):
        store.delete(gone)
        store.purge([Conversation(id=gone)])
        assert store.create(Conversation()).id not in ids
    with contextlib.closing(ConversationStore.open(tmp_path / "c.db")) as again:
        last = again.create(Conversation()).id
    assert last > max(ids) + 3


def test_no_word_of_a_purged_conversation_is_left(store):
    talk(store, "plain text")
    gone = store.create(Conversation(title="Popocatepetl")).id
    store.add(Turn(conversation_id=gone, role="user", content="a quetzalcoatl", status="complete"))
    store.delete(gone)
    store.purge([Conversation(id=gone)])
    store.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with open(store.name, "rb") as file:
        raw = file.read().lower()
    # the search index stores only how a word differs from the one before, so not its first letter
    assert b"uetzalcoatl" not in raw
    assert b"opocatepetl" not in raw


@pytest.mark.parametrize("column", ["attachments", "calls", "stats"])
@pytest.mark.parametrize("damage", ["", "[", "17", b"\xff\xfe"])
def test_a_damaged_column_costs_itself_alone(store, column, damage, caplog):
    conversation = talk(store, "first", "second")
    head = store.conversation(conversation).head_id
    store.db.execute(f"UPDATE turn SET {column} = ? WHERE id = ?", (damage, head))
    turns = store.turns(conversation)
    assert [turn.content for turn in turns.values()] == ["first", "second"]
    assert getattr(turns[head], column) == getattr(Turn(), column)
    assert f"Turn {head}: {column} cannot be read" in caplog.text


def test_damaged_text_is_shown_as_far_as_it_is_text(store):
    conversation = talk(store, "first", "second")
    store.db.execute("UPDATE turn SET status = status, content = CAST(x'61ff62' AS TEXT) WHERE id = 1")
    assert store.turns(conversation)[1].content == "a\ufffdb"


def test_a_file_that_cannot_be_opened_is_not_to_be_moved_aside(tmp_path):
    path = tmp_path / "c.db"
    path.mkdir()
    with pytest.raises(StoreError, match="unable to open") as refused:
        ConversationStore.open(path)
    assert "check the permissions of" in refused.value.hint


def test_missing_migration_is_noticed(tmp_path):
    (tmp_path / "0001_a.sql").write_text("")
    (tmp_path / "0003_c.sql").write_text("")
    with pytest.raises(StoreError, match="files of edgeinfer are missing"):
        migrations(tmp_path)


class Deleted:
    """A conversation that was deleted long ago, with a cached block."""

    def __init__(self):
        self.store = ConversationStore.open()
        gone = self.store.create(Conversation(title="secret"))
        self.store.add(Turn(conversation_id=gone.id, content="secret words"))
        now, self.store.clock = self.store.clock, lambda: 0
        self.store.delete(gone.id)
        self.store.clock = now
        self._blocks = BlockStore(paths.blocks_dir()).open_folder("sha", {})
        root, tokens = self._blocks.names.root(), list(range(256))
        self._name = self._blocks.names.full(root, tokens)
        header = Header("full", self._name, root, self._blocks.names.identity, pack_tokens(tokens), ())
        assert self._blocks.write(KvBlock(header, (as_state(memoryview(b"abc")),)))
        self._blocks.add_owner(gone.owner, [self._name])
        assert self._blocks.close()

    def is_gone(self):
        return not self.store.overdue() and not self._blocks.has(self._name)


def run_hi(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["run", "hi"], FixedHost(FakeEngine([words("Hello")]))) == 0


@pytest.fixture
def deleted_conversation():
    conversation = Deleted()
    assert not conversation.is_gone()
    yield conversation
    conversation.store.close()


def test_plain_chat_purges_deleted_conversations(tmp_path, deleted_conversation):
    setup = make_setup(tmp_path, FixedHost(FakeEngine([words("Hello")])))
    setup.open_store = ConversationStore.open
    Repl(setup, io.StringIO("/quit\n"), io.StringIO()).run()
    assert deleted_conversation.is_gone()


async def test_textual_chat_purges_deleted_conversations(tmp_path, deleted_conversation):
    app = make_app(tmp_path, FixedHost(FakeEngine([["x"]])))
    app.chat.setup.open_store = ConversationStore.open
    async with app.run_test() as pilot:
        await wait_shown(pilot, deleted_conversation.is_gone)


def test_run_purges_deleted_conversations(deleted_conversation, monkeypatch):
    run_hi(monkeypatch)
    wait_until(deleted_conversation.is_gone, "the conversation to be purged")


def test_run_does_not_wait_for_the_purge(deleted_conversation, monkeypatch):
    answered = threading.Event()
    forget = retention.forget_conversations

    def forget_late(*arguments):
        assert answered.wait(60)
        return forget(*arguments)

    monkeypatch.setattr(store_module, "forget_conversations", forget_late)
    run_hi(monkeypatch)
    assert not deleted_conversation.is_gone()
    answered.set()
    wait_until(deleted_conversation.is_gone, "the conversation to be purged")


def test_purging_erases_the_answers_kept_for_drafts(deleted_conversation):
    gone, kept_ids = [*range(100, 140)], [*range(200, 240)]
    answers = BlockStore(paths.blocks_dir()).open_folder("sha", {}).answers
    answers.add("", "chat-1", gone)
    answers.add("", "chat-99", kept_ids)
    purge_deleted()
    ring = answers.of("").ring.tolist()
    assert not set(gone) & set(ring)
    assert set(kept_ids) <= set(ring)


def test_run_migrates_no_store_of_an_older_version(deleted_conversation, monkeypatch):
    """`update` tries a new version in the user's home folder, and may keep the old one."""
    with contextlib.closing(sqlite3.connect(store_path())) as db:
        db.execute("PRAGMA user_version = 1")
        run_hi(monkeypatch)
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
    assert not deleted_conversation.is_gone()


def test_endpoint_purges_deleted_conversations(tmp_path, deleted_conversation):
    model = make_llama(tmp_path / "tiny.gguf")
    arguments = ["serve", str(model), "--port", "0", "--resume", "never"]
    command = [sys.executable, "-m", "edgeinfer", *arguments]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(deleted_conversation.is_gone, "the conversation to be purged")
        finally:
            process.terminate()
