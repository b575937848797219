"""`functions` and `function_call`, which chat completions had before `tools`.

They are read as tools, and answered in the words of the client that asked so.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from edgeinfer.errors import InvalidRequestError
from edgeinfer.runtime.events import Event, Finished, ToolCallDelta
from edgeinfer.runtime.generation import Collected
from edgeinfer.server.openai import wire
from edgeinfer.server.openai import wire_replies as replies
from edgeinfer.server.openai.render import ChatRenderer, chunk_end

_encode = msgspec.json.Encoder().encode


def is_older(body: wire.ChatRequest) -> bool:
    """Whether calls are to be told as `function_call`."""
    return bool(body.functions)


def modern(body: wire.ChatRequest) -> wire.ChatRequest:
    """The body with tools alone. Raises InvalidRequestError where it has both."""
    if not body.functions:
        if body.function_call not in (None, "none", "auto"):
            raise InvalidRequestError("function_call needs functions", param="function_call")
        return msgspec.structs.replace(body, functions=None, function_call=None)
    if body.tools or body.tool_choice is not None:
        raise InvalidRequestError("functions cannot be combined with tools", param="functions")
    choice = body.function_call
    return msgspec.structs.replace(
        body,
        functions=None,
        function_call=None,
        tools=[wire.ToolParam(function=function) for function in body.functions],
        tool_choice=wire.NamedToolChoice(choice) if isinstance(choice, wire.NamedFunction) else choice,
        parallel_tool_calls=False,
    )


def turns(messages: Sequence[wire.ChatMessage]) -> list[wire.Turn]:
    """Make tool calls of function calls, and their answers the tools'. Raises InvalidRequestError."""
    found: list[wire.Turn] = []
    called: dict[str, str] = {}
    for number, turn in enumerate(messages):
        if isinstance(turn, wire.AssistantMessage) and turn.function_call is not None:
            call = turn.function_call
            called[call.name] = f"call_{number}"
            calls = [*(turn.tool_calls or ()), wire.ToolCallParam(called[call.name], call)]
            found.append(msgspec.structs.replace(turn, function_call=None, tool_calls=calls))
        elif isinstance(turn, wire.FunctionMessage):
            if turn.name not in called:
                raise InvalidRequestError(
                    f"nothing has called the function {turn.name!r} before", param=f"messages[{number}]"
                )
            found.append(wire.ToolMessage(turn.content or "", called[turn.name]))
        else:
            found.append(turn)
    return found


class FunctionsRenderer(ChatRenderer):
    """Chat completions whose calls are told as `function_call`."""

    def event(self, index: int, event: Event) -> bytes:
        if isinstance(event, ToolCallDelta):
            function = replies.DeltaFunction(name=event.name or None, arguments=event.arguments)
            return self._delta(index, b'{"function_call":' + _encode(function))
        return super().event(index, event)

    def _finish(self, index: int, end: Finished) -> bytes:
        if end.reason != "tool_calls":
            return super()._finish(index, end)
        return self._end(index, end, chunk_end(index, "function_call"))

    def _choice(self, index: int, answer: Collected) -> replies.ChatChoice:
        choice = super()._choice(index, answer)
        calls = choice.message.tool_calls
        if not calls:
            return choice
        message = msgspec.structs.replace(
            choice.message, tool_calls=None, function_call=calls[0].function
        )
        is_call = choice.finish_reason == "tool_calls"
        reason: replies.WireFinish = "function_call" if is_call else choice.finish_reason
        return msgspec.structs.replace(choice, message=message, finish_reason=reason)
