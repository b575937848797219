"""Files of v0.2.0 can be opened by this version, as docs/development/versioning.md promises.

`samples/v0.2.0` is a home folder that v0.2.0 (f37d8f0f) wrote: a pulled model, a conversation with an
alternative answer, a configuration, and a few files of a snapshot. Paths were replaced by made-up ones.
"""

import os
import shutil
from pathlib import Path

import pytest

from edgeinfer.chat.history.store import ConversationStore
from edgeinfer.chat.history.values import branch_to
from edgeinfer.config.config_file import load_config
from edgeinfer.models.store import read_record
from edgeinfer.platform import paths

SAMPLE = Path(__file__).parent / "samples/v0.2.0"


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    home = tmp_path / "home"
    shutil.copytree(SAMPLE, home)
    for path in (home, *home.rglob("*")):  # git does not store these modes
        path.chmod(0o700 if path.is_dir() else 0o600)
    monkeypatch.setenv("EDGEINFER_HOME", str(home))


def test_configuration():
    config = load_config()
    values = (config.default_model, config.load.ctx, config.serve.port, config.snapshots.max_total_gib)
    assert values == ("tiny", 8192, 8090, 20.0)
    assert config.serve.aliases == {"gpt": "tiny"}


def test_model(as_json):
    record = read_record(paths.models_dir() / "tiny")
    for path, file in zip(record.paths, record.files, strict=True):
        os.utime(path, ns=(file.mtime_ns, file.mtime_ns))  # nor modification times
    (listed,) = [m for m in as_json("list")["models"] if m["name"] == "tiny"]
    assert listed["size_bytes"] == 1984
    assert as_json("show", "tiny")["name"] == "tiny"


def test_conversation_is_migrated():
    for _ in range(2):
        store = ConversationStore.open()
        conversation = store.conversation(store.listing(limit=1)[0].id)
        turns = store.turns(conversation.id)
        question, answer = branch_to(turns, conversation.head_id)
        assert (question.attachments[0].text, answer.content) == ("The sea is wide.", "Blue and grün.")
        assert [turn.status for turn in turns.values()] == ["complete", "complete", "stopped"]
        assert [conversation.title for conversation in store.search("grün")] == ["Colours of the sea"]
        store.close()


def test_snapshot_is_listed_and_refused_by_name(as_json):
    (listed,) = as_json("snapshots", "list")["snapshots"]
    assert (listed["details"]["name"], listed["fresh"]) == ("small", False)
    assert listed["state"] == "the program that built it was removed"
