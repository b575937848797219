"""Leases: a conversation has one writer, whether that ends, fails or is killed."""

import os
import signal
import subprocess
import sys

import pytest
from chats_here import consume
from fake_engine import FakeEngine, StepGate

from edgeinfer.chat.history.store import ConversationStore
from edgeinfer.chat.session import ChatSession
from edgeinfer.errors import UsageError

HOLDER = """
import sys
from pathlib import Path
from edgeinfer.chat.history import lease
held = lease.acquire(Path(sys.argv[1]), int(sys.argv[2]))
print("held" if held else "refused", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def open_store(tmp_path):
    stores = []

    def open_chat():
        stores.append(ConversationStore.open(tmp_path / "conversations.db"))
        return stores[-1]

    yield open_chat
    for store in stores:
        store.close()


def ask(open_store, engine):
    session = ChatSession(open_store, engine=engine)
    session.ask("hi")
    return session


def test_a_refused_request_leaves_no_lease(open_store):
    engine = FakeEngine()
    session = ask(open_store, engine)
    engine.close()
    with pytest.raises(Exception, match="closed"):
        session.begin_answer()
    assert not open_store().is_answering(session.conversation.id)


def test_a_killed_writer_holds_nothing(open_store, tmp_path):
    store = open_store()
    conversation = ask(open_store, None).conversation
    command = [sys.executable, "-c", HOLDER, tmp_path / "conversations.leases", str(conversation.id)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        assert store.is_answering(conversation.id)
        assert not store.is_answering(conversation.id + 1)
        with pytest.raises(UsageError):
            store.acquire(conversation.id)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(20)
    store.acquire(conversation.id).release()


def test_a_long_prefill_is_not_taken_for_a_dead_process(tmp_path):
    now = [1_000_000]
    store = ConversationStore.open(tmp_path / "conversations.db", clock=lambda: now[0])
    gate = StepGate()
    session = ChatSession(lambda: store, engine=FakeEngine([[gate, "late"]]))
    session.ask("hi")
    answer = session.begin_answer()
    now[0] += 3_600_000
    assert store.clean_up() == 0
    gate.opened.set()
    consume(answer)
    assert store.turns(session.conversation.id)[answer.turn.id].content == "late"
    store.close()
