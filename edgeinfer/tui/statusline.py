"""What the status line and its hint say, from the state of the chat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgeinfer.tui.widgets.status import Part

if TYPE_CHECKING:
    from edgeinfer.tui.screens.chat import ChatScreen


def status_parts(screen: ChatScreen) -> tuple[tuple[Part, ...], str]:
    """The parts from left to right, and the hint at the right edge."""
    session = screen.session
    parts = [Part(session.conversation.model or screen.launch.model, 9, "bold")]
    hint = "F1 help"
    if screen.streaming is not None:
        rate = screen.streaming.tokens_per_s
        parts.append(Part(f"writing {rate:.0f} tok/s" if rate else "writing", 10, "$accent"))
        hint = "Esc stops"
    elif screen.front.summarising is not None:
        parts.append(Part("summarising…", 10, "$accent"))
        hint = "Esc stops"
    elif screen.loader.words:
        parts.append(Part(screen.loader.words, 10, "$accent"))
    elif screen.transcript.chosen is not None:
        hint = "e edit · c copy · y code · f fork · Esc"
    else:
        parts.append(Part(screen.app.started, 6, shortens=True))
    parts += _numbers(screen)
    return tuple(parts), hint


def _numbers(screen: ChatScreen) -> list[Part]:
    answers = [t for t in screen.session.path if t.role == "assistant" and t.stats.completion_tokens]
    engine = screen.session.engine
    if not answers:
        return [Part(f"context {engine.info.n_ctx:,}", 6)] if engine else []
    stats = answers[-1].stats
    n_ctx = engine.info.n_ctx if engine else stats.n_ctx
    share = 100 * stats.context_tokens // n_ctx if n_ctx else 0
    style = "$warning" if share >= 80 else ""
    rate = "" if screen.streaming is not None else f"{stats.tokens_per_s:.1f} tok/s"
    return [
        Part(f"context {stats.context_tokens:,}/{n_ctx:,}", 8, style),
        Part(rate, 7),
        Part(f"first {stats.ttft_ms:,.0f} ms", 5),
        Part(f"cached {stats.cached_tokens:,}" if stats.cached_tokens else "", 4),
    ]
