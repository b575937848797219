"""A conversation store in a temporary file for each test."""

import pytest

from edgeinfer.chat.history.store import ConversationStore


@pytest.fixture
def store(tmp_path):
    store = ConversationStore.open(tmp_path / "c.db")
    yield store
    store.close()
