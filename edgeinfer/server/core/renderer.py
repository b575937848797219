"""What every renderer of an answer can do, and the totals and timings that it writes."""

from __future__ import annotations

from typing import Protocol

from edgeinfer.runtime.events import Event, Finished, Timings, Usage
from edgeinfer.runtime.generation import Collected
from edgeinfer.server.core.problems import Problem
from edgeinfer.server.core.wire import WireTimings


class Renderer(Protocol):
    """One route's shape of an answer.

    A streaming answer is `opening`, then `event`s, then `closing`, in the form of its dialect.
    """

    def opening(self) -> bytes:
        """The first bytes, once the request is accepted."""

    def event(self, index: int, event: Event) -> bytes:
        """One event of generation `index`; b"" when the client need not hear of it."""

    def closing(self) -> bytes:
        """The last bytes, after every generation has ended."""

    def failure(self, problem: Problem, request_id: str) -> bytes:
        """The last bytes when something failed after the stream had begun."""

    def waiting(self, said: str) -> bytes:
        """An event that says nothing, while there is nothing to say; `said` is for people who look.

        Clients give up on a stream without events, and a comment is none.
        """

    def whole(self, answers: list[Collected]) -> bytes:
        """The JSON body of a request that is not streamed."""


def sse_comment(said: str) -> bytes:
    """A comment in a stream of server-sent events: people see it, clients skip it."""
    return f": {said}\n\n".encode()


def total(ends: list[Finished], n: int | None = None) -> tuple[Usage, Timings]:
    """Total one request: each prompt once, every answer, the slowest timings.

    Each prompt counts with the first of its `n` answers; `n` None means that all answers are to one
    prompt.
    """
    if len(ends) == 1:
        return ends[0].usage, ends[0].timings
    firsts = ends[:: n or len(ends)]
    usage = Usage(
        prompt_tokens=sum(end.usage.prompt_tokens for end in firsts),
        cached_tokens=sum(end.usage.cached_tokens for end in firsts),
        cached_disk_tokens=sum(end.usage.cached_disk_tokens for end in firsts),
        completion_tokens=sum(end.usage.completion_tokens for end in ends),
        reasoning_tokens=sum(end.usage.reasoning_tokens for end in ends),
    )
    return usage, max((end.timings for end in ends), key=lambda timings: timings.decode_ms)


def wire_timings(usage: Usage, timings: Timings) -> WireTimings:
    """The `timings` block, in llama.cpp's names."""
    prefilled = max(0, usage.prompt_tokens - usage.cached_tokens)
    made = usage.completion_tokens
    return WireTimings(
        queue_ms=round(timings.queue_ms, 3),
        ttft_ms=round(timings.ttft_ms, 3),
        cache_n=usage.cached_tokens,
        cache_disk_n=usage.cached_disk_tokens,
        prompt_n=prefilled,
        prompt_ms=round(timings.prefill_ms, 3),
        prompt_per_token_ms=round(timings.prefill_ms / prefilled, 3) if prefilled else 0.0,
        prompt_per_second=round(prefilled * 1000 / timings.prefill_ms, 2)
        if timings.prefill_ms
        else 0.0,
        predicted_n=made,
        predicted_ms=round(timings.decode_ms, 3),
        predicted_per_token_ms=round(timings.decode_ms / (made - 1), 3) if made > 1 else 0.0,
        predicted_per_second=round(timings.decode_tokens_per_s(made), 2),
        constraint_ms=round(timings.constraint_ms, 3),
        draft_n=timings.draft_tokens,
        draft_n_accepted=timings.draft_accepted_tokens,
    )
