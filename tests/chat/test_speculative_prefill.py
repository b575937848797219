"""Speculative prefill of whole words, files and opened conversations, and its cancellation."""

import threading

import pytest
from chats_here import consume
from fake_engine import FakeEngine, StepGate

from edgeinfer.chat.history.values import Attachment
from edgeinfer.chat.session import ChatSession
from edgeinfer.chat.speculative_prefill import TYPING_INTERVAL_S, SpeculativePrefill, whole_words
from edgeinfer.runtime.engine import load_engine
from edgeinfer.runtime.options import LoadOptions, ModelFiles

NOTES = Attachment(name="notes.txt", text="the word is swordfish")


class Composer:
    """An input field that is checked for changes, with a clock that the test sets."""

    def __init__(self, session):
        self.now = 100.0
        self.session = session
        self.ahead = SpeculativePrefill(session, lambda: self.now)
        self.reading = None  # the last prefill, which has not ended yet

    def check_input(self, text, attachments=(), editing=None):
        if begins := self.ahead.check_input(text, attachments, editing):
            self.reading = self.ahead.submit()
        return begins

    def finish(self):
        self.ahead.follow(self.reading)

    def stand_still(self, text, *arguments):
        return self.check_input(text, *arguments) or self.check_input(text, *arguments)


@pytest.fixture
def engine():
    return FakeEngine([["one"], ["two"]])


@pytest.fixture
def composer(store, engine):
    return Composer(ChatSession(lambda: store, "fake", engine))


def questions_of(request):
    return [m.content for m in request.messages]


def answer(session, text, attachments=()):
    session.ask(text, attachments)
    consume(session.begin_answer())


@pytest.mark.parametrize(
    ("text", "whole"),
    [("", ""), ("Why", ""), ("Why is", "Why"), ("Why is ", "Why is"), ("a\n\nb", "a"), (" a", "")],
)
def test_word_being_typed_is_left_out(text, whole):
    assert whole_words(text) == whole


def test_unchanged_text_is_prefilled_once_and_is_a_prefix_of_the_question(composer, engine):
    composer.now += TYPING_INTERVAL_S
    composer.session.set(system_prompt="Be kind.")
    assert composer.stand_still("Why is the sk", [NOTES])
    assert not composer.stand_still("Why is the sky", [NOTES])
    (read,) = engine.read
    assert read.max_tokens == 0
    assert not read.cache_on_disk  # the user may delete unsent text, so it must not get on disk
    answer(composer.session, "Why is the sky blue?", [NOTES])
    whole, prefix = (engine.apply_template(r) for r in (engine.requests[0], read))
    assert whole.startswith(prefix.removesuffix("\nassistant:"))
    assert questions_of(read)[1].endswith("swordfish\n```\n\nWhy is the")
    assert read.continue_final  # the last word may be continued
    assert read.background


def test_text_typed_without_a_pause_is_prefilled_now_and_then(composer, engine):
    composer.check_input("One ")
    for text in ("One two ", "One two three ", "One two three four "):
        composer.check_input(text)
    assert [questions_of(r) for r in engine.read] == [["One"]]
    composer.now += TYPING_INTERVAL_S
    composer.check_input("One two three four five ")
    assert len(engine.read) == 1  # the first prefill still runs, and keeps what it has computed
    composer.finish()
    composer.check_input("One two three four five ")
    assert questions_of(engine.read[-1]) == ["One two three four five"]


def test_changed_text_cancels_the_prefill(composer, engine):
    composer.stand_still("One two ")
    first = composer.reading.generation
    composer.stand_still("Another one ")
    assert [event.reason for event in first if hasattr(event, "reason")]
    assert questions_of(engine.read[-1]) == ["Another one"]


def test_file_alone_is_prefilled_and_a_command_is_not(composer, engine):
    assert not composer.stand_still("/model other ")
    assert composer.stand_still("", [NOTES])
    assert questions_of(engine.read[0]) == ["File `notes.txt`:\n```\nthe word is swordfish\n```"]


def test_opened_conversation_is_prefilled_before_typing(composer, engine):
    answer(composer.session, "first")
    number = composer.session.conversation.id
    composer.session.new()
    assert not composer.stand_still("")
    composer.session.open(number)
    assert composer.stand_still("")
    assert questions_of(engine.read[-1]) == ["first", "one"]
    assert not engine.read[-1].continue_final


def test_edited_question_is_prefilled_in_its_own_branch(composer, engine):
    answer(composer.session, "first", [NOTES])
    answer(composer.session, "second")
    composer.stand_still("anew and ", (), composer.session.path[0].id)
    assert len(engine.read[-1].messages) == 1
    assert questions_of(engine.read[-1])[0].endswith("swordfish\n```\n\nanew and")


def test_prefill_waits_for_an_engine_and_the_end_of_an_answer(composer, engine):
    composer.session.engine = None
    assert not composer.stand_still("One two ")
    gate = StepGate(threading.Event())
    composer.session.engine = FakeEngine([[gate, "x"]])
    composer.session.ask("q")
    running = composer.session.begin_answer()
    assert not composer.stand_still("One two three ")
    gate.opened.set()
    consume(running)
    assert composer.stand_still("One two three ")


def test_cached_tokens_are_known_after_the_prefill(composer, engine):
    answer(composer.session, "first")
    assert composer.ahead.check_input("", (), None)
    composer.ahead.run()
    assert composer.ahead.cached_tokens == len(engine.tokenize_chat(engine.read[0]))
    composer.session.new()
    composer.check_input("")
    assert composer.ahead.cached_tokens == 0


def test_refused_prefill_is_silent_and_a_later_stop_wins(composer, engine):
    composer.check_input("One two ")
    composer.ahead.stop()
    composer.ahead.submit()
    assert len(engine.read) == 1
    engine.close()
    assert composer.stand_still("One two three ")


@pytest.mark.model
def test_model_computes_only_tokens_that_were_not_prefilled(store, smollm2):
    engine = load_engine(ModelFiles(name="m", paths=(str(smollm2),)), LoadOptions(n_ctx=1024))
    session = ChatSession(lambda: store, "m", engine)
    session.set(sampling={"temperature": 0.0, "max_tokens": 2})
    composer = Composer(session)
    text = "Please tell me, in a few plain words and without haste, all about the history of"
    composer.stand_still(f"{text} ", [NOTES])
    composer.finish()
    answer(session, f"{text} Rome", [NOTES])
    stats = session.path[-1].stats
    engine.close()
    # at most the last word and the end of the chat template
    assert stats.prompt_tokens - stats.cached_tokens <= 8
