"""Shorten a conversation that does not fit into the context, and summarise the dropped turns."""

from __future__ import annotations

from collections.abc import Sequence

from edgeinfer.chat.attachments import with_attachments
from edgeinfer.chat.history.values import Turn, sent_part
from edgeinfer.chat.session import ChatSession
from edgeinfer.errors import ContextLengthError, InterruptedByUser, UsageError
from edgeinfer.runtime.events import Event, Finished, TextDelta
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.requests import GenerateRequest, Message, Sampling, hint_beyond_training

#: After older turns are dropped, the remaining turns fill at most this share of the context.
KEEP_SHARE = 0.5

#: Number of tokens that stay free for a question and its answer when a text is cut to fit.
ANSWER_TOKENS = 1024

_SUMMARISE = (
    "Summarise the conversation below in at most 150 words. Keep names, numbers, decisions and open "
    "questions. Write only the summary."
)
_SUMMARY_TOKENS = 300


def prompt_tokens(session: ChatSession, engine: Engine, turns: Sequence[Turn]) -> int:
    shown = session.tools.request_tools() if session.tools is not None else ()
    messages = session.prompt.messages(turns)
    return len(engine.tokenize_chat(GenerateRequest(messages=messages, tools=shown)))


def first_kept(session: ChatSession, engine: Engine) -> Turn:
    """Return the question with which the conversation begins after its oldest turns are dropped.

    It is the earliest question that, with all turns after it, fills at most `KEEP_SHARE` of the
    context; if there is none, the last question. Raises UsageError if there is only one question,
    ContextLengthError if the last question does not fit into the context.
    """
    path = session.path
    _, sent = sent_part(path)
    questions = [i for i, turn in enumerate(sent) if turn.role == "user"]
    if len(questions) < 2:
        problem = "there is no turn before the last question to drop or summarise"
        raise UsageError(problem, hint="begin a new conversation: `/new`")
    room = int(engine.info.n_ctx * KEEP_SHARE)
    for index in questions[1:]:
        if prompt_tokens(session, engine, sent[index:]) <= room:
            return sent[index]
    last = sent[questions[-1]]
    n_tokens = prompt_tokens(session, engine, [last])
    if n_tokens < engine.info.n_ctx - 16:
        return last
    larger = "shorten the question, or load a larger context: `/ctx N`"
    raise ContextLengthError(
        f"even the last question is longer than the context of {engine.info.n_ctx} tokens",
        param="messages",
        hint=hint_beyond_training(n_tokens, engine.info.n_ctx_train) or larger,
    )


def larger_context(engine: Engine, n_tokens: int) -> int:
    """Return a larger context (tokens) for `n_tokens` and an answer; 0 if the model supports none."""
    n_ctx = 1 << (n_tokens + ANSWER_TOKENS).bit_length()
    return n_ctx if engine.info.n_ctx < n_ctx <= engine.info.n_ctx_train else 0


def fitting_start(engine: Engine, text: str) -> str:
    """Return as much of the start of `text` as fits into the context together with an answer."""
    room = max(engine.info.n_ctx - ANSWER_TOKENS, engine.info.n_ctx // 2)
    return engine.detokenize(engine.tokenize(text)[:room]).decode("utf-8", "ignore")


def summary_text(events: Sequence[Event]) -> str:
    """Return the summary in a generation's events. Raises InterruptedByUser if the user stopped it."""
    if any(isinstance(event, Finished) and event.reason == "cancelled" for event in events):
        raise InterruptedByUser("the summary was stopped, so the model still gets every turn")
    return "".join(event.text for event in events if isinstance(event, TextDelta)).strip()


def summary_request(session: ChatSession, engine: Engine, first_sent: Turn) -> GenerateRequest:
    """Return a request to summarise the turns before `first_sent`.

    If these turns do not fit into the context, their oldest text is left out.
    """
    path = session.path
    summary, sent = sent_part(path)
    before = sent[: [t.id for t in sent].index(first_sent.id)]
    lines = [f"Summary of what was before: {summary}"] if summary else []
    texts = ((turn.role, with_attachments(turn.content, turn.attachments)) for turn in before)
    lines += [f"{role}: {text}" for role, text in texts if text]
    room = engine.info.n_ctx - _SUMMARY_TOKENS - 100
    tokens = engine.tokenize("\n\n".join(lines))
    text = engine.detokenize(tokens[-max(room, 64) :]).decode("utf-8", "ignore")
    return GenerateRequest(
        messages=(Message(role="system", content=_SUMMARISE), Message(role="user", content=text)),
        sampling=Sampling(temperature=0.0),
        max_tokens=min(_SUMMARY_TOKENS, max(32, engine.info.n_ctx // 4)),
    )
