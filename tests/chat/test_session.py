"""The session with a scripted engine: turns before answers, branches, shortening, failures."""

import pytest
from chats_here import AllowingFront, consume
from fake_engine import DEFAULT_INFO, FakeEngine
from msgspec.structs import replace
from tools_here import calling

from edgeinfer.chat import context
from edgeinfer.chat.history.store import ConversationStore
from edgeinfer.chat.session import ChatSession, title_of
from edgeinfer.config.config_file import ToolsConfig
from edgeinfer.errors import (
    ContextLengthError,
    DecodeError,
    EngineClosedError,
    QueueFullError,
    StoreError,
    UsageError,
)
from edgeinfer.runtime.events import ReasoningDelta
from edgeinfer.tools.approval import Decision
from edgeinfer.tools.loop import ChatTools


def session_with(store, *scripts, **info):
    engine = FakeEngine(scripts, info=replace(DEFAULT_INFO, **info))
    session = ChatSession(lambda: store, "fake", engine)
    return session, engine


def ask(session, text):
    session.ask(text)
    return consume(session.begin_answer())


def reread(session):
    """Return the turns as another process reads them."""
    other = ChatSession(lambda: session.store)
    other.open(session.conversation.id)
    return other


def test_answer_is_stored_with_its_figures(store):
    session, engine = session_with(store, ["Be", "cause"], system_prompt="Be brief.")
    done = ask(session, "Why?")
    assert (done.content, done.status) == ("Because", "complete")
    assert done.stats.completion_tokens == 2
    assert done.stats.n_ctx == 4096
    assert reread(session).path == session.path
    said = [(m.role, m.content) for m in engine.requests[0].messages]
    assert said == [("system", "Be brief."), ("user", "Why?")]
    assert engine.requests[0].conversation == f"chat-{session.conversation.id}"


def test_answer_has_a_limit_unless_set_or_tools_are_on(store, tmp_path):
    session, engine = session_with(store, ["Because"])
    ask(session, "Why?")
    session.set(sampling={"max_tokens": 9000})
    ask(session, "Why?")
    session.set(sampling={})
    session.tools = ChatTools(ToolsConfig(builtin=("read",)), tmp_path)
    session.tools.prepare()
    ask(session, "Why?")
    thinking, thinker = session_with(store, ["Because"], can_think=True)
    ask(thinking, "Why?")
    assert [r.max_tokens for r in (*engine.requests, *thinker.requests)] == [1500, 9000, None, 8000]


def test_draft_belongs_to_one_window_of_a_conversation(store):
    first, _ = session_with(store, ["Because"])
    assert first.owns_draft(), "a new conversation has no other window"
    ask(first, "Why?")
    assert first.owns_draft()
    second = ChatSession(lambda: store)
    second.open(first.conversation.id)
    assert not second.owns_draft()
    first.new()
    assert first.owns_draft()
    assert second.owns_draft(), "the first window has left"


def test_continue_takes_the_newest_conversation_that_no_window_has_open(store):
    windows = []
    for text in ("oldest", "middle", "newest"):
        window, _ = session_with(store, ["Because"])
        window.is_window = True
        ask(window, text)
        windows.append(window)
    windows[0].new()
    assert windows[0].open_last() == "The last conversation is open in another window."
    assert windows[0].conversation.title == "oldest", "the other two are open"
    other = ChatSession(lambda: store)
    assert other.open_last() == "Every conversation is open in another window."
    assert not other.conversation.id
    windows[1].release_draft()
    other.open_last()
    assert other.conversation.title == "middle"
    windows[2].fork()
    third = ChatSession(lambda: store)
    third.open_last()
    assert third.conversation.title == "newest", "its window has opened a copy"
    page = ChatSession(lambda: store)
    page.open(windows[0].conversation.id)
    windows[0].release_draft()
    fourth = ChatSession(lambda: store)
    fourth.open_last()
    assert fourth.conversation.title == "oldest", "the page is no window"


def test_chat_goes_on_without_a_store_that_cannot_be_opened():
    def refuse_to_open():
        raise StoreError("conversations.db: Read-only file system")

    session = ChatSession(refuse_to_open, "fake", FakeEngine([["Because"]]))
    assert ask(session, "Why?").content == "Because"
    assert session.unstored == "conversations.db: Read-only file system. This chat is not stored."
    assert [turn.role for turn in session.path] == ["user", "assistant"]


def test_flush_returns_only_stored_text(store):
    session, _ = session_with(store, ["a", ReasoningDelta("hm"), "b"])
    session.ask("x")
    answer = session.begin_answer()
    shown = ""
    for event in answer.generation:
        answer.add(event)
        before = reread(session).path[-1].content
        assert before == shown
        piece = answer.flush()
        shown += piece.text
        assert reread(session).path[-1].content == shown
    assert shown == "ab"
    assert answer.done.reasoning == "hm"


def test_whole_answer_is_neither_continued_nor_edited(store):
    session, _ = session_with(store)
    done = ask(session, "x")
    with pytest.raises(UsageError, match="not cut"):
        session.continue_answer()
    with pytest.raises(UsageError, match="only a question"):
        session.edit(done.id, "y")


def test_refused_request_is_kept_with_its_reason_and_asking_again_takes_its_place(store):
    session, engine = session_with(store)
    engine.submit = lambda request: (_ for _ in ()).throw(QueueFullError("the queue is full"))
    session.ask("q")
    with pytest.raises(QueueFullError):
        session.begin_answer()
    assert not session.busy
    assert not store.is_answering(session.conversation.id)
    assert (session.head.status, session.head.error) == ("failed", "the queue is full")
    del engine.submit
    assert ask(session, "q, please").content == "Hello world"
    assert [t.content for t in session.path] == ["q, please", "Hello world"]
    assert session.alternatives(session.path[0].id) == (2, 2)


def test_question_without_an_engine_is_refused(store):
    session = ChatSession(lambda: store, "m")
    session.ask("q")
    with pytest.raises(EngineClosedError):
        session.begin_answer()
    assert session.head.role == "user"


def test_second_answer_at_a_time_is_refused(store):
    session, _ = session_with(store)
    session.ask("q")
    answer = session.begin_answer()
    with pytest.raises(UsageError):
        session.ask("another")
    with pytest.raises(UsageError):
        session.regenerate()
    consume(answer)
    session.ask("another")


def test_leaving_a_conversation_keeps_its_partial_answer(store):
    session, _ = session_with(store, ["some words"])
    session.ask("q")
    answer = session.begin_answer()
    first = session.conversation.id
    session.new()
    assert answer.done.status == "stopped"
    assert session.path == []
    session.open(first)
    assert [t.status for t in session.path] == ["complete", "stopped"]


def test_store_that_fails_midway_does_not_stop_the_answer(store):
    session, _ = session_with(store, ["a", "b"])
    session.ask("q")
    answer = session.begin_answer()
    store.db.execute("PRAGMA query_only = ON")
    done = consume(answer)
    store.db.execute("PRAGMA query_only = OFF")
    assert done.content == "ab"
    assert isinstance(answer.store_error, StoreError)


def test_empty_question_is_refused(store):
    session, _ = session_with(store)
    with pytest.raises(UsageError, match="the question is empty"):
        session.ask("  \n ")
    assert session.conversation.id == 0


class TestContext:
    def long(self, store, **info):
        session, engine = session_with(store, ["x" * 300], n_ctx=1000, **info)
        for n in range(4):
            ask(session, f"question {n}")
        return session, engine

    def test_summary_replaces_dropped_turns(self, store):
        session, engine = self.long(store, system_prompt="Be kind.")
        turn = context.first_kept(session, engine)
        request = context.summary_request(session, engine, turn)
        assert "question 2" in request.messages[1].content
        assert len(request.messages[1].content) <= 600
        session.drop_turns_before(turn.id, "They talked.")
        system = session.prompt.messages(session.path)[0].content
        assert system == "Be kind.\n\nSummary of the conversation so far:\nThey talked."
        again = context.summary_request(session, engine, session.path[-2])
        assert "Summary of what was before: They talked." in again.messages[1].content

    def test_the_only_question_cannot_be_dropped(self, store):
        session, engine = session_with(store)
        ask(session, "q")
        with pytest.raises(UsageError):
            context.first_kept(session, engine)

    def test_question_longer_than_the_context(self, store):
        session, engine = self.long(store)
        session.ask("y" * 2000)
        with pytest.raises(ContextLengthError):
            context.first_kept(session, engine)


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("Why?", "Why?"),
        ("  first line \nsecond", "first line"),
        ("a " * 50, "a " * 29 + "a…"),
        ("x" * 200, "x" * 60),
        ("", ""),
    ],
)
def test_title_is_the_first_line_cut_at_a_word(text, title):
    assert title_of(text)[: len(title)] == title
    assert len(title_of(text)) <= 61


@pytest.fixture
def read_tool(tmp_path):
    (tmp_path / "a.txt").write_text("swordfish\n")
    tools = ChatTools(ToolsConfig(builtin=("read",)), tmp_path)
    tools.prepare()
    yield tools
    tools.close()


READ_A = calling(files__read={"path": "a.txt"})


def run_calls(session):
    turn = session.calls
    return session.note_calls(turn, session.start_calls(turn, AllowingFront())())


def test_a_conversation_whose_calls_run_is_not_written_by_another(store, read_tool):
    session, _ = session_with(store, READ_A)
    session.tools = read_tool
    ask(session, "What is the word?")
    other, turn = reread(session), session.calls
    run = session.start_calls(turn, AllowingFront())
    with pytest.raises(UsageError, match="written elsewhere"):
        other.ask("And now?")
    session.note_calls(turn, run())
    other.ask("And now?")


class AllowingHere(AllowingFront):
    """Allows the tool in this conversation, and counts the cards."""

    cards = 0

    def decide(self, card):
        self.cards += 1
        return Decision("conversation")


def test_permissions_end_with_their_conversation(tmp_path):
    """Another conversation may get the same id: here, the first one of another store."""
    tools, front = ChatTools(ToolsConfig(builtin=("write",)), tmp_path), AllowingHere()
    tools.prepare()
    for created_ms in (1, 2):
        store = ConversationStore.open(tmp_path / f"{created_ms}.db", lambda ms=created_ms: ms)
        session, _ = session_with(store, calling(files__write={"path": "a", "content": "x"}))
        session.tools = tools
        ask(session, "Write.")
        turn = session.calls
        session.note_calls(turn, session.start_calls(turn, front)())
        assert session.conversation.id == 1
        assert front.cards == created_ms
        store.close()
    tools.close()


def test_interrupted_call_is_told_as_that(store, read_tool):
    session, engine = session_with(store, READ_A, ["ok"])
    session.tools = read_tool
    ask(session, "What is the word?")
    other = reread(session)
    other.engine = engine
    ask(other, "Go on.")
    assert "interrupted" in engine.requests[1].messages[2].content


def test_answer_to_results_that_fails_is_replaced_alone(store, read_tool):
    session, engine = session_with(store, READ_A, [DecodeError("no")], ["then"])
    session.tools = read_tool
    ask(session, "What is the word?")
    run_calls(session)
    answer = session.begin_answer()
    with pytest.raises(DecodeError):
        consume(answer)
    answer.fail(DecodeError("no"))
    ask(session, "Again, please.")
    questions = [turn.content for turn in session.path if turn.role == "user"]
    assert questions == ["What is the word?", "Again, please."]
    assert "swordfish" in engine.requests[2].messages[2].content


def test_regenerating_begins_at_the_question(store, read_tool):
    session, _ = session_with(store, READ_A, ["one"], ["two"])
    session.tools = read_tool
    ask(session, "What is the word?")
    run_calls(session)
    consume(session.begin_answer())
    consume(session.regenerate())
    assert [t.content for t in session.path] == ["What is the word?", "two"]
    assert session.alternatives(session.path[1].id) == (2, 2)
