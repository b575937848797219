"""Convert engine events to the response object of OpenAI's Responses API, or to its event stream.

In a stream, events announce each item and part, send its text in pieces, and repeat it as a whole.
`sequence_number` counts the events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from edgeinfer.runtime.event_stream import CollectedAnswer
from edgeinfer.runtime.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    TokenLogprobs,
    ToolCallDelta,
    Usage,
)
from edgeinfer.server.dialect import Renderer, sse, sse_comment, wire_timings
from edgeinfer.server.openai.render import error_text, wire_logprobs
from edgeinfer.server.openai.wire import TextFormat
from edgeinfer.server.problems import Problem
from edgeinfer.server.responses import wire
from edgeinfer.server.responses.translate import functions_of

_encode = msgspec.json.Encoder().encode
_EMPTY_PARTS = {"message": wire.OutputTextOut(text=""), "reasoning": wire.ReasoningTextOut(text="")}


class ResponseRenderer(Renderer):
    """Renders POST /v1/responses. `store` is called with the finished response."""

    def __init__(
        self,
        request_id: str,
        model: str,
        body: wire.ResponsesRequest,
        *,
        store: Callable[[wire.ResponseReply], None] | None = None,
    ) -> None:
        self.id = request_id
        self._store = store
        self.model = model
        self.created = int(time.time())
        self._request = body
        self._names = {name: (space, tool.name) for name, space, tool in functions_of(body)}
        self._answer = CollectedAnswer()
        self._sequence = -1
        self._items: list[tuple[str, Any]] = []

    def opening(self) -> bytes:
        reply = self.reply("in_progress")
        created = self._sse("response.created", response=reply)
        return created + self._sse("response.in_progress", response=reply)

    def event(self, index: int, event: Event) -> bytes:
        self._answer.add(event)
        match event:
            case TextDelta():
                return self._switch_item("message", 0) + self._part(
                    "response.output_text.delta", delta=event.text, logprobs=_logprobs(event.logprobs)
                )
            case ReasoningDelta():
                out = self._switch_item("reasoning", 0)
                return out + self._part("response.reasoning_text.delta", delta=event.text)
            case ToolCallDelta():
                out = self._switch_item("function_call", event.index)
                kind = "response.function_call_arguments.delta"
                return out + (self._of_item(kind, delta=event.arguments) if event.arguments else b"")
        return b""

    def closing(self) -> bytes:
        reply = self._whole(self._answer)
        done = self._finish_item("incomplete" if self._answer.finish.is_cut_short else "completed")
        return done + self._sse(f"response.{reply.status}", response=reply)

    def failure(self, problem: Problem) -> bytes:
        reply = self.reply("failed")
        error = wire.ResponseError(code=problem.code or "server_error", message=error_text(problem))
        return self._sse("response.failed", response=msgspec.structs.replace(reply, error=error))

    def waiting(self, text: str) -> bytes:
        in_progress = self.reply("in_progress")
        return sse_comment(text) + self._sse("response.in_progress", response=in_progress)

    def _sse(self, event_type: str, /, **data: Any) -> bytes:
        self._sequence += 1
        return sse({"type": event_type, "sequence_number": self._sequence, **data}, event_type)

    def _of_item(self, event_type: str, /, **data: Any) -> bytes:
        """Encode an event about the last item."""
        index = len(self._items) - 1
        return self._sse(event_type, item_id=self._item_id(index), output_index=index, **data)

    def _part(self, event_type: str, /, **data: Any) -> bytes:
        """Encode an event about the last item's only content part."""
        index = len(self._items) - 1
        item_id = self._item_id(index)
        return self._sse(event_type, item_id=item_id, output_index=index, content_index=0, **data)

    def _switch_item(self, kind: str, number: int) -> bytes:
        if self._items and self._items[-1] == (kind, number):
            return b""
        out = self._finish_item()
        self._items.append((kind, number))
        index = len(self._items) - 1
        item = self._item(index, "in_progress", empty=True)
        out += self._sse("response.output_item.added", output_index=index, item=item)
        if kind in _EMPTY_PARTS:
            out += self._part("response.content_part.added", part=_EMPTY_PARTS[kind])
        return out

    def _finish_item(self, status: wire.ItemStatus = "completed") -> bytes:
        if not self._items:
            return b""
        index = len(self._items) - 1
        item = self._item(index, status)
        if isinstance(item, wire.FunctionCallOut):
            kind = "response.function_call_arguments.done"
            out = self._of_item(kind, name=item.name, arguments=item.arguments)
        elif isinstance(item, wire.MessageOut | wire.ReasoningOut):
            content = item.content[0]
            if isinstance(content, wire.OutputTextOut):
                text, logprobs = content.text, content.logprobs
                out = self._part("response.output_text.done", text=text, logprobs=logprobs)
            else:
                out = self._part("response.reasoning_text.done", text=content.text)
            out += self._part("response.content_part.done", part=content)
        return out + self._sse("response.output_item.done", output_index=index, item=item)

    def _item_id(self, index: int) -> str:
        kind, _ = self._items[index]
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        return f"{prefix}_{self.id.removeprefix('resp_')}_{index}"

    def _item(self, index: int, status: wire.ItemStatus, *, empty: bool = False) -> wire.OutputItem:
        kind, number = self._items[index]
        item_id, answer = self._item_id(index), self._answer
        if kind == "message":
            text = wire.OutputTextOut(text=answer.text, logprobs=_logprobs(answer.logprobs))
            return wire.MessageOut(id=item_id, content=[] if empty else [text], status=status)
        if kind == "reasoning":
            thought = wire.ReasoningTextOut(text=answer.reasoning)
            return wire.ReasoningOut(id=item_id, content=[] if empty else [thought], status=status)
        call = answer.calls[number]
        namespace, name = self._names.get(call.name, (None, call.name))
        return wire.FunctionCallOut(
            id=item_id,
            call_id=call.id,
            name=name,
            arguments="" if empty else call.arguments,
            status=status,
            namespace=namespace or msgspec.UNSET,
        )

    def whole(self, answers: list[CollectedAnswer]) -> bytes:
        (answer,) = answers
        if answer.reasoning:
            self._items.append(("reasoning", 0))
        if answer.text or not answer.calls:
            self._items.append(("message", 0))
        self._items += [("function_call", number) for number in sorted(answer.calls)]
        self._answer = answer
        return _encode(self._whole(answer))

    def _whole(self, answer: CollectedAnswer) -> wire.ResponseReply:
        finished = answer.finish
        output = [self._item(index, "completed") for index in range(len(self._items))]
        if finished.is_cut_short and output:
            output[-1] = msgspec.structs.replace(output[-1], status="incomplete")
        status = "incomplete" if finished.is_cut_short else "completed"
        cause = wire.IncompleteDetails(reason="max_output_tokens") if finished.is_cut_short else None
        reply = self.reply(status, output, finished.usage)
        timings = wire_timings(finished.usage, finished.timings)
        reply = msgspec.structs.replace(reply, incomplete_details=cause, timings=timings)
        if self._store is not None and finished.reason != "cancelled":
            self._store(reply)
        return reply

    def reply(
        self, status: Any, output: Sequence[wire.OutputItem] = (), usage: Usage | None = None
    ) -> wire.ResponseReply:
        """Make the response object; without `output` and `usage` it is that of a running request."""
        body = self._request
        text = (body.text and body.text.format) or TextFormat()
        return wire.ResponseReply(
            id=self.id,
            created_at=self.created,
            model=self.model,
            status=status,
            output=list(output),
            usage=None if usage is None else _wire_usage(usage),
            tools=msgspec.to_builtins(body.tools or []),
            tool_choice=msgspec.to_builtins(body.tool_choice or "auto"),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            text={"format": msgspec.to_builtins(text)},
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            truncation=body.truncation or "disabled",
            previous_response_id=body.previous_response_id,
            store=self._store is not None,
            reasoning=msgspec.to_builtins(body.reasoning) if body.reasoning else None,
        )


def _logprobs(tokens: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    return msgspec.to_builtins(wire_logprobs(tokens).content) if tokens else []


def _wire_usage(usage: Usage) -> wire.ResponseUsage:
    return wire.ResponseUsage(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        input_tokens_details=wire.InputDetails(
            cached_tokens=usage.cached_tokens, cached_disk_tokens=usage.cached_disk_tokens
        ),
        output_tokens_details=wire.OutputDetails(reasoning_tokens=usage.reasoning_tokens),
    )
