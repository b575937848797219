"""Leases: a conversation has one writer, whether that ends, fails or is killed."""

import os
import signal
import subprocess
import sys

import pytest
from chats_here import consume
from fake_engine import FakeEngine, StepGate

from edgeinfer.chat.history.values import Conversation
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


def test_a_killed_writer_holds_nothing(store, tmp_path):
    conversation = store.create(Conversation())
    command = [sys.executable, "-c", HOLDER, tmp_path / "c.leases", str(conversation.id)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        assert store.is_answering(conversation.id)
        assert not store.is_answering(conversation.id + 1)
        with pytest.raises(UsageError):
            store.acquire(conversation.id)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(60)
    store.acquire(conversation.id).release()


def test_a_long_prefill_is_not_taken_for_a_dead_process(store):
    now = [1_000_000]
    store.clock = lambda: now[0]
    gate = StepGate()
    session = ChatSession(lambda: store, engine=FakeEngine([[gate, "late"]]))
    session.ask("hi")
    answer = session.begin_answer()
    now[0] += 3_600_000
    assert store.clean_up() == 0
    gate.opened.set()
    consume(answer)
    assert store.turns(session.conversation.id)[answer.turn.id].content == "late"
