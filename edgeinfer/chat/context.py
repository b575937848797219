"""Shorten a conversation that has outgrown the context, and summarise the omitted turns."""

from __future__ import annotations

from collections.abc import Sequence

from edgeinfer.chat.attachments import with_attachments
from edgeinfer.chat.history.values import Turn, sent_part
from edgeinfer.chat.session import ChatSession
from edgeinfer.errors import ContextLengthError, UsageError
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.requests import GenerateRequest, Message, Sampling, hint_beyond_training

#: Largest share of the context that the turns after a cut may fill.
KEEP_SHARE = 0.5

#: Tokens reserved for a question and its answer when a text fills the context.
ANSWER_TOKENS = 1024

_SUMMARISE = (
    "Summarise the conversation below in at most 150 words. Keep names, numbers, decisions and open "
    "questions. "
    "Write only the summary."
)
_SUMMARY_TOKENS = 300


def prompt_tokens(session: ChatSession, engine: Engine, turns: Sequence[Turn]) -> int:
    """Count the prompt tokens of these turns."""
    shown = session.tools.request_tools() if session.tools is not None else ()
    messages = session.prompt.messages(turns)
    return len(engine.tokenize_chat(GenerateRequest(messages=messages, tools=shown)))


def first_kept(session: ChatSession, engine: Engine) -> Turn:
    """Return the earliest question from which on all turns fit and leave room for an answer.

    Raises UsageError if nothing can be left out, ContextLengthError if the last question is too long.
    """
    path = session.path
    _, sent = sent_part(path)
    questions = [i for i, turn in enumerate(sent) if turn.role == "user"]
    if len(questions) < 2:
        raise UsageError("there is nothing older to leave out", hint="begin a new conversation: `/new`")
    room = int(engine.info.n_ctx * KEEP_SHARE)
    for index in questions[1:]:
        if prompt_tokens(session, engine, sent[index:]) <= room:
            return sent[index]
    last = sent[questions[-1]]
    n_tokens = prompt_tokens(session, engine, [last])
    if n_tokens < engine.info.n_ctx - 16:
        return last
    larger = "shorten it, or load with a larger context: `/ctx N`"
    raise ContextLengthError(
        f"even the last question is longer than the context of {engine.info.n_ctx} tokens",
        param="messages",
        hint=hint_beyond_training(n_tokens, engine.info.n_ctx_train) or larger,
    )


def larger_context(engine: Engine, n_tokens: int) -> int:
    """Return a context for `n_tokens` and an answer; 0 if it exceeds the model's training."""
    n_ctx = 1 << (n_tokens + ANSWER_TOKENS).bit_length()
    return n_ctx if engine.info.n_ctx < n_ctx <= engine.info.n_ctx_train else 0


def fitting_start(engine: Engine, text: str) -> str:
    """Return as much of the beginning of `text` as fits into the context together with an answer."""
    room = max(engine.info.n_ctx - ANSWER_TOKENS, engine.info.n_ctx // 2)
    return engine.detokenize(engine.tokenize(text)[:room]).decode("utf-8", "ignore")


def summary_request(session: ChatSession, engine: Engine, first_sent: Turn) -> GenerateRequest:
    """Build the request that summarises the turns before `first_sent`; the oldest are cut to fit."""
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
