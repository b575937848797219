"""A store of conversations in a file of the test's own."""

import pytest

from edgeinfer.chat.history.store import ConversationStore


@pytest.fixture
def store(tmp_path):
    store = ConversationStore.open(tmp_path / "c.db")
    yield store
    store.close()
