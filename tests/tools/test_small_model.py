"""Tools with a real small model: valid calls, and a list of tools that is prefilled once."""

import contextlib

import pytest
from chats_here import AllowingFront, consume
from tools_here import tools_config

from edgeinfer.chat.history.store import ConversationStore
from edgeinfer.chat.session import ChatSession
from edgeinfer.runtime.engine import load_engine
from edgeinfer.runtime.events import Finished
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.runtime.prefix_cache.block_folder import BlockStore
from edgeinfer.runtime.prefix_cache.retention import CacheLimits
from edgeinfer.tools.loop import ChatTools
from edgeinfer.tools.prompt_prefix import prefill_request

pytestmark = pytest.mark.model


@pytest.fixture
def start(smollm2, tmp_path):
    """Load the model with the prefix cache of this test."""

    @contextlib.contextmanager
    def start():
        files = ModelFiles(name="small", paths=(str(smollm2),))
        with contextlib.closing(load_engine(files, LoadOptions(n_ctx=4096, kv_type="f16"))) as engine:
            engine.open_prefix_cache(BlockStore(tmp_path / "blocks", CacheLimits(), print))
            yield engine

    return start


def test_two_tools_are_called_with_valid_arguments_and_answered(start, tmp_path):
    config = tools_config("plain", choice="required", deny=("plain.fail",))
    store = ConversationStore.open(tmp_path / "c.db")
    with contextlib.closing(ChatTools(config, tmp_path)) as tools, start() as engine:
        tools.prepare()
        session = ChatSession(lambda: store, "small", engine)
        session.tools = tools
        session.set(sampling={"temperature": 0.0, "max_tokens": 200})
        called = set()
        for question in ("What is the weather in Rome?", "Add 17 and 25."):
            session.new()
            session.ask(question)
            done = consume(session.begin_answer())
            assert done.calls
            assert session.note_calls(done, session.start_calls(done, AllowingFront())())
            called |= {(use.name, use.status) for use in session.head.calls}
            session.set(sampling={"temperature": 0.0, "max_tokens": 40})
            consume(session.begin_answer())
            session.set(sampling={"temperature": 0.0, "max_tokens": 200})
        assert {("plain__weather", "done"), ("plain__add", "done")} <= called
    store.close()


def test_prefilled_tools_are_found_by_a_new_session_of_another_process(start, tmp_path):
    with contextlib.closing(ChatTools(tools_config("plain"), tmp_path)) as tools:
        tools.prepare()
        with start() as engine:
            request = prefill_request(engine, tools.request_tools(), "Be brief.")
            usage = next(e.usage for e in engine.submit(request) if isinstance(e, Finished))
            assert usage.prompt_tokens == len(request.prompt) > 200
        store = ConversationStore.open(tmp_path / "c.db")
        with start() as engine:
            session = ChatSession(lambda: store, "small", engine)
            session.tools = tools
            session.set(system_prompt="Be brief.", sampling={"max_tokens": 1})
            session.ask("How much is 2 + 2?")
            stats = consume(session.begin_answer()).stats
        assert stats.cached_tokens >= usage.prompt_tokens - 1
        store.close()
