"""A deleted conversation goes for good a day later, text and KV blocks, whichever verb runs then."""

import contextlib
import io
import sqlite3
import subprocess
import sys

import pytest
from fake_engine import FakeEngine
from fixed_chat import FixedHost, make_app, make_launch, words
from fixed_chat import wait_until as wait_shown
from made_models import make_llama
from other_processes import wait_until

from edgeinfer.chat.history.store import ConversationStore, store_path
from edgeinfer.chat.history.values import Conversation, Turn
from edgeinfer.chat.repl import Repl
from edgeinfer.cli.main import main
from edgeinfer.platform import paths
from edgeinfer.runtime.kv_cache.sequence_state import whole
from edgeinfer.runtime.prefix_cache.format import Header, KvBlock, pack_tokens
from edgeinfer.runtime.prefix_cache.store import BlockStore


class Deleted:
    """A conversation that was deleted long ago, and a block of it."""

    def __init__(self):
        self.store = ConversationStore.open()
        gone = self.store.create(Conversation(title="secret"))
        self.store.add(Turn(conversation_id=gone.id, content="secret words"))
        now, self.store.clock = self.store.clock, lambda: 0
        self.store.delete(gone.id)
        self.store.clock = now
        self._blocks = BlockStore(paths.blocks_dir()).model("sha", {})
        root, tokens = self._blocks.names.root(), list(range(256))
        self._name = self._blocks.names.full(root, tokens)
        header = Header("full", self._name, root, self._blocks.names.identity, pack_tokens(tokens), ())
        assert self._blocks.write(KvBlock(header, (whole(memoryview(b"abc")),)))
        self._blocks.own(gone.owner, [self._name])
        assert self._blocks.close()

    def is_gone(self):
        return not self.store.overdue() and not self._blocks.has(self._name)


@pytest.fixture
def deleted():
    found = Deleted()
    assert not found.is_gone()
    yield found
    found.store.close()


def test_plain_chat_purges_deleted_conversations(tmp_path, deleted):
    launch = make_launch(tmp_path, FixedHost(FakeEngine([words("Hello")])))
    launch.open_store = ConversationStore.open
    Repl(launch, io.StringIO("/quit\n"), io.StringIO()).run()
    assert deleted.is_gone()


async def test_textual_chat_purges_deleted_conversations(tmp_path, deleted):
    app = make_app(tmp_path, FixedHost(FakeEngine([["x"]])))
    app.chat.launch.open_store = ConversationStore.open
    async with app.run_test() as pilot:
        await wait_shown(pilot, deleted.is_gone)


def test_run_purges_deleted_conversations(deleted, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["run", "hi"], FixedHost(FakeEngine([words("Hello")]))) == 0
    assert deleted.is_gone()


def test_run_migrates_no_store_of_an_older_version(deleted, monkeypatch):
    """`update` tries a new version in the user's home, and the installed one may stay."""
    monkeypatch.setattr(sys, "stdin", None)
    with contextlib.closing(sqlite3.connect(store_path())) as db:
        db.execute("PRAGMA user_version = 1")
        assert main(["run", "hi"], FixedHost(FakeEngine([words("Hello")]))) == 0
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
    assert not deleted.is_gone()


def test_endpoint_purges_deleted_conversations(tmp_path, deleted):
    model = make_llama(tmp_path / "tiny.gguf")
    arguments = ["serve", str(model), "--port", "0", "--resume", "never"]
    command = [sys.executable, "-m", "edgeinfer", *arguments]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(deleted.is_gone, "the conversation to be purged")
        finally:
            process.terminate()
