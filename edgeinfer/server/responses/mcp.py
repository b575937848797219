"""Tools of `{"type": "mcp"}`: the operator's servers, called between a response's generations.

The operator's policy decides about each call: what it does not allow becomes an approval request, which
a later request answers. No address of a server is taken from a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from edgeinfer.errors import EdgeInferError
from edgeinfer.runtime.events import Event, Finished, ToolCallDelta
from edgeinfer.runtime.generation import Collected
from edgeinfer.runtime.interface import Engine, Generation
from edgeinfer.runtime.requests import GenerateRequest, Tool
from edgeinfer.server.context import RequestContext
from edgeinfer.server.dialect import total
from edgeinfer.server.problems import Problem
from edgeinfer.server.responses import wire
from edgeinfer.tools.approval import Decision
from edgeinfer.tools.uses import Stop, ToolUse, call_messages, shown_name, uses_of

if TYPE_CHECKING:
    from edgeinfer.tools.loop import Card, ChatTools
    from edgeinfer.tools.mcp_client import ToolInfo

_STATUSES = {"done": "completed", "failed": "failed"}
_LIST_EVENTS: tuple[tuple[str, dict[str, str]], ...] = (
    ("response.mcp_list_tools.in_progress", {}),
    ("response.mcp_list_tools.completed", {}),
)


class ServerItem(msgspec.Struct, frozen=True):
    """An output item that the endpoint adds, with the events between its first and its last one."""

    item: wire.McpListItem | wire.McpCallItem | wire.McpApprovalRequestItem
    events: tuple[tuple[str, dict[str, str]], ...] = ()


class RoundEnd(msgspec.Struct, frozen=True):
    """The calls of a generation are answered; another generation follows."""


class _Front:
    """Decides as the client has; `asked` are the calls that wait for it."""

    def __init__(self, *, approves: bool) -> None:
        self._approves = approves
        self.asked: set[str] = set()

    def decide(self, card: Card) -> Decision:
        if not self._approves:
            self.asked.add(card.id)
        return Decision("once" if self._approves else "no")

    def show_use(self, use: ToolUse, text: str) -> None:
        pass


class McpCalls:
    """The MCP tools of one request, and what has been yielded of its answer."""

    def __init__(
        self, context: RequestContext, chat_tools: ChatTools, body: wire.ResponsesRequest
    ) -> None:
        self._endpoint = context.endpoint
        self._tools = chat_tools
        self._asks: set[str] = set()
        self.offered: dict[str, Tool] = {}
        self.events: list[Any] = []
        listed = {i.server_label for i in _items(body) if isinstance(i, wire.McpListItem)}
        by_name = {tool.name: tool for tool in chat_tools.request_tools()}
        bound = self._bound = chat_tools.toolbox.bound_tools()
        for server in body.tools or ():
            if not isinstance(server, wire.McpTool):
                continue
            label = server.server_label
            tools = {n: t.info for n, t in bound.items() if t.server == label and n in by_name}
            if not tools:
                labels = ", ".join(sorted({tool.server for tool in bound.values()}))
                message = f"No MCP server {label!r} with tools is configured here; there are: {labels}."
                raise Problem(400, message, param="tools", code="invalid_value")
            tools = {n: t for n, t in tools.items() if server.allows(t.name, t.read_only)}
            self.offered |= {name: by_name[name] for name in tools}
            self._asks |= {name for name, tool in tools.items() if server.asks(tool.name)}
            if label not in listed:
                rows = [_row(by_name[name], info) for name, info in tools.items()]
                item = wire.McpListItem(
                    id=f"mcpl_{context.plain_id}_{label}", server_label=label, tools=rows
                )
                self.events.append(ServerItem(item, _LIST_EVENTS))

    async def run_approved(self, body: wire.ResponsesRequest) -> wire.ResponsesRequest:
        """Make the calls that the client has approved, each once; return the request with them."""
        items = _items(body)
        answers = {
            i.approval_request_id: i for i in items if isinstance(i, wire.McpApprovalResponseItem)
        }
        done = {i.approval_request_id for i in items if isinstance(i, wire.McpCallItem)}
        new_items: list[wire.Item] = []
        for item in items:
            new_items.append(item)
            if not isinstance(item, wire.McpApprovalRequestItem) or item.id in done:
                continue
            if (answer := answers.get(item.id)) is None:
                continue
            name = shown_name(item.server_label, item.name)
            use = ToolUse(id=item.id.removeprefix("mcpr_"), name=name, arguments=item.arguments)
            if name not in self.offered:
                use = use.end("refused", "this request does not offer the tool")
            elif not answer.approve:
                use = use.end("refused", ": ".join(filter(None, ("the user said no", answer.reason))))
            elif self._canonical(use) != use:
                use = use.end("refused", "its path leads elsewhere than when it was shown")
            else:
                (use,) = await self._run([use], _Front(approves=True), Stop(), [])
            self.events.append(self._call_item(use, item.id))
            new_items.append(self.events[-1].item)
        return msgspec.structs.replace(body, input=new_items) if new_items else body

    def _names(self, use: ToolUse) -> dict[str, str]:
        label, _, name = use.name.partition("__")
        if (tool := self._bound.get(use.name)) is not None:
            label, name = tool.server, tool.info.name  # a long name is shortened for the model
        return {"server_label": label, "name": name, "arguments": use.arguments}

    def _canonical(self, use: ToolUse) -> ToolUse:
        """Return a call of a built-in tool with the path that it opens: what is shown is made."""
        tool = self._bound[use.name]
        builtin = self._tools.toolbox.builtin.get(tool.server)
        try:
            arguments = msgspec.json.decode(use.arguments, type=dict[str, Any])
        except msgspec.MsgspecError:
            return use  # the call itself says what is wrong
        resolved = builtin.canonical(tool.info.name, arguments) if builtin else arguments
        if resolved == arguments:
            return use
        return msgspec.structs.replace(use, arguments=msgspec.json.encode(resolved).decode())

    def _approval(self, use: ToolUse) -> ServerItem:
        return ServerItem(wire.McpApprovalRequestItem(id=f"mcpr_{use.id}", **self._names(use)))

    def _call_item(self, use: ToolUse, approval_request_id: str | None = None) -> ServerItem:
        is_done = use.status == "done"
        item = wire.McpCallItem(
            id=f"mcp_{use.id}",
            output=use.result if is_done else None,
            error=None if is_done else {"type": "mcp_tool_execution_error", "content": use.result},
            status=_STATUSES.get(use.status, "incomplete"),
            approval_request_id=approval_request_id,
            **self._names(use),
        )
        events: list[tuple[str, dict[str, str]]] = [
            ("response.mcp_call.in_progress", {}),
            ("response.mcp_call_arguments.delta", {"delta": use.arguments}),
            ("response.mcp_call_arguments.done", {"arguments": use.arguments}),
            (f"response.mcp_call.{'completed' if is_done else 'failed'}", {}),
        ]
        return ServerItem(item, tuple(events))

    async def _run(
        self, uses: Sequence[ToolUse], front: _Front, stop: Stop, past: Sequence[Sequence[ToolUse]]
    ) -> tuple[ToolUse, ...]:
        return await asyncio.to_thread(self._tools.run, uses, front, stop, past=past)

    def between(self, engine: Engine, request: GenerateRequest, first: Generation) -> Generation:
        """Return the generations of a response, with the calls between them, as one."""
        return _Rounds(self, engine, request, first)

    async def rounds(
        self, rounds: _Rounds, engine: Engine, request: GenerateRequest
    ) -> AsyncIterator[Any]:
        """Yield the events of every generation, and items of calls; one Finished at the end."""
        past: list[tuple[ToolUse, ...]] = []
        ends: list[Finished] = []
        while True:
            answer, own_indexes = Collected(), set[int]()
            async for event in rounds.generation:
                answer.add(event)
                if isinstance(event, ToolCallDelta) and event.name in self.offered:
                    own_indexes.add(event.index)
                is_ours = isinstance(event, ToolCallDelta) and event.index in own_indexes
                if not is_ours and not isinstance(event, Finished):
                    yield event
            ends.append(answer.finished)
            uses = tuple(self._canonical(use) for use in uses_of(answer) if use.name in self.offered)
            if answer.finished.reason != "tool_calls" or not uses:
                break
            front = _Front(approves=False)
            asking = [use for use in uses if use.name in self._asks]
            run = [use for use in uses if use.name not in self._asks]
            done = await self._run(run, front, rounds.stop, past)
            front.asked |= {use.id for use in asking}
            for use in [*done, *asking]:
                yield self._approval(use) if use.id in front.asked else self._call_item(use)
            if front.asked or len(answer.calls) > len(uses) or rounds.stop.is_set:
                break
            past.append(done)
            yield RoundEnd()
            request = msgspec.structs.replace(
                request,
                messages=(*request.messages, *call_messages(answer.text, answer.reasoning, done)),
                tool_choice=self._tools.fields(past)["tool_choice"],
            )
            rounds.generation = await self._endpoint.preparation.submit(engine, request)
            if rounds.stop.is_set:
                rounds.generation.cancel()
        usage, timings = total(ends, 1)
        yield msgspec.structs.replace(ends[-1], usage=usage, timings=timings)


class _Rounds:
    """A `Generation` of several."""

    def __init__(
        self, calls: McpCalls, engine: Engine, request: GenerateRequest, first: Generation
    ) -> None:
        self.generation = first
        self.stop = Stop()
        self._calls = calls
        self._events = calls.rounds(self, engine, request)

    async def __aiter__(self) -> AsyncIterator[Event]:
        for event in tuple(self._calls.events):
            yield event
        async for event in self._events:
            self._calls.events.append(event)
            yield event

    def __iter__(self) -> Iterator[Event]:
        raise NotImplementedError

    def tap(self, tap: Callable[[Event], bool] | None) -> None:
        """Take nothing: every event is iterated."""

    def cancel(self) -> None:
        self.stop.set()
        self.generation.cancel()


def _row(tool: Tool, info: ToolInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "description": tool.description,
        "input_schema": tool.parameters,
        "annotations": {"read_only": info.read_only},
    }


def _items(body: wire.ResponsesRequest) -> Sequence[wire.Item]:
    return () if isinstance(body.input, str) else body.input


async def mcp_calls(context: RequestContext, body: wire.ResponsesRequest) -> McpCalls | None:
    """Return the MCP tools of a request, None if it names none. Raises Problem 400, 403."""
    if not any(isinstance(tool, wire.McpTool) for tool in body.tools or ()):
        return None
    if not context.is_admin:
        message = "MCP servers need the endpoint's first API key or, without keys, its own user."
        raise Problem(403, message, param="tools", code="admin_only")
    try:
        tools = await context.endpoint.use_tools()
    except EdgeInferError as error:
        raise Problem(400, error.message, param="tools", code=error.code) from error
    return McpCalls(context, tools, body)
