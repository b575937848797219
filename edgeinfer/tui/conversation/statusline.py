"""What the status line says, from the state of the chat."""

from __future__ import annotations

from edgeinfer.chat.history.values import Stats
from edgeinfer.chat.session import ChatSession
from edgeinfer.tui.widgets.status import Part


def numbers(session: ChatSession, *, writing: bool, remembered: int = 0) -> list[Part]:
    """Return context, rate, first token and cached tokens of the last answer.

    While one is being `writing`, the rate is left out: it is shown as it grows. Before the first one in
    a conversation that was opened, the tokens `remembered` of it stand for all but the context.
    """
    answers = [t for t in session.path if t.role == "assistant" and t.stats.completion_tokens]
    engine = session.engine
    if not answers:
        return [Part(f"context {engine.info.n_ctx:,}", 6)] if engine else []
    stats = answers[-1].stats
    n_ctx = engine.info.n_ctx if engine else stats.n_ctx
    is_opened = session.answer is None and bool(remembered)
    share = 100 * stats.context_tokens // n_ctx if n_ctx else 0
    return [
        Part(f"context {stats.context_tokens:,}/{n_ctx:,}", 8, "$warning" if share >= 80 else ""),
        *([Part(f"{remembered:,} tokens remembered", 7)] if is_opened else _of_answer(stats, writing)),
    ]


def _of_answer(stats: Stats, writing: bool) -> list[Part]:
    return [
        Part("" if writing else f"{stats.tokens_per_s:.1f} tok/s", 7),
        Part(f"first {stats.ttft_ms:,.0f} ms", 5),
        Part(f"cached {stats.cached_tokens:,}" if stats.cached_tokens else "", 4),
    ]
