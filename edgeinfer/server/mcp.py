"""The endpoint as an MCP server (Streamable HTTP): a message or a batch a request, answers in JSON.

`edgeinfer mcp` is the same over standard streams: it posts its lines here.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgeinfer import __version__
from edgeinfer.chat import attachments
from edgeinfer.chat.history.values import Attachment
from edgeinfer.errors import EngineClosedError, InvalidRequestError
from edgeinfer.runtime.generation import Collected
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.server.connection import unless
from edgeinfer.server.context import RequestContext, json_reply, with_engine
from edgeinfer.server.dialect import Dialect, RouteTable
from edgeinfer.server.generation import GenerationSpec, GenerationTask, answer, start
from edgeinfer.server.native.routes import infer_request
from edgeinfer.server.native.wire import InferRequest
from edgeinfer.server.openai.render import ChatRenderer
from edgeinfer.server.openai.wire import ChatRequest
from edgeinfer.server.problems import Problem
from edgeinfer.server.request_body import read_body
from edgeinfer.server.wire_types import ModelFields, TokenCount
from edgeinfer.tools.mcp_client import VERSIONS
from edgeinfer.tools.prefix import prefill_request

ROUTES = RouteTable()
_PARSE, _INTERNAL = -32700, -32603
_INVALID, _NO_METHOD = -32600, -32601
_PARAMS = -32602
_INSTRUCTIONS = "A language model on this machine. It sees what `ask` gives it and nothing else."

#: Later versions have no batches; clients of this one do not name it in a header.
_LAST_WITH_BATCHES = "2025-03-26"
_Batch = Annotated[list[msgspec.Raw], Meta(min_length=1, max_length=64)]

Id = Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)] | Annotated[str, Meta(max_length=1024)] | None
_PATH = "Absolute path of a text, PDF or DOCX file, or of a folder of text files"
Model = Annotated[str | None, Meta(description="A pulled model; the default one if left out.")]


class McpMessage(msgspec.Struct, frozen=True):
    """A message of JSON-RPC: without `id` a notification, without `method` a client's answer."""

    jsonrpc: Literal["2.0"]
    method: str = ""
    id: Id = None
    params: dict[str, Any] = {}


class McpReply(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of JSON-RPC, with a result or an error."""

    id: Id
    result: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    error: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    jsonrpc: str = "2.0"


class _Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: Model = None


class Ask(_Tool, frozen=True, kw_only=True):
    """Ask the language model of this machine. It remembers no earlier question."""

    question: Annotated[str, Meta(min_length=1, max_length=1_048_576)]
    document: Annotated[str | None, Meta(description=f"{_PATH}, which the question is about.")] = None
    max_tokens: TokenCount | None = None


class Embed(_Tool, frozen=True, kw_only=True):
    """Return a normalised vector for each text, of a model that embeds."""

    texts: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=256)]


class SearchConversations(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Search the user's conversations with models of this machine by words; newest first."""

    words: Annotated[str, Meta(min_length=1, max_length=1000)]
    limit: Annotated[int, Meta(ge=1, le=60)] = 10


class ReadDocument(_Tool, frozen=True, kw_only=True):
    """Have the model read a document ahead: `ask` with that document then answers at once."""

    path: Annotated[str, Meta(description=f"{_PATH}.")]


_TOOLS: dict[str, type[msgspec.Struct]] = {
    "ask": Ask,
    "embed": Embed,
    "search_conversations": SearchConversations,
    "read_document": ReadDocument,
}
#: The calls that run, by key, session and id: a cancel comes in a request of its own.
_running: dict[tuple[str, str, Id], asyncio.Event] = {}
_reading: set[asyncio.Task[Any]] = set()


@ROUTES.post("/mcp", body=McpMessage | _Batch, reply=McpReply | list[McpReply], also={"202": None})
async def mcp(context: RequestContext) -> Response:
    """Answer one message of the Model Context Protocol."""
    raw = await read_body(context.request)
    version = context.headers.get("mcp-protocol-version", "")
    if version and version not in VERSIONS:
        return _failure(None, _INVALID, f"protocol version {version} is not supported", 400)
    if not raw.lstrip().startswith(b"["):
        return _answer(context, raw)
    try:
        batch = msgspec.json.decode(raw, type=_Batch)
    except (msgspec.MsgspecError, RecursionError) as error:
        return _failure(None, _INVALID, f"not a batch: {error}", 400)
    if version > _LAST_WITH_BATCHES:
        return _failure(None, _INVALID, f"protocol version {version} has no batches", 400)
    return await _answer_batch(context, batch)


def _answer(context: RequestContext, raw: bytes) -> Response:
    try:
        message = msgspec.json.decode(raw, type=McpMessage)
    except msgspec.ValidationError as error:
        return _failure(None, _INVALID, str(error), 400)
    except (msgspec.DecodeError, RecursionError) as error:
        return _failure(None, _PARSE, str(error), 400)
    if message.id is None or not message.method:
        if message.method == "notifications/cancelled" and "mcp-session-id" in context.headers:
            number = message.params.get("requestId")
            if isinstance(number, str | int) and (call := _running.get(_call_key(context, number))):
                call.set()
        return Response(status_code=202)
    match message.method:
        case "initialize":
            return _initialize(message)
        case "ping":
            return _result(message.id, {})
        case "tools/list":
            return _result(message.id, {"tools": [_describe(name) for name in _tool_names(context)]})
        case "tools/call":
            return _start_call(context, message)
    return _failure(message.id, _NO_METHOD, f"{message.method} is not offered")


async def _answer_batch(context: RequestContext, batch: list[msgspec.Raw]) -> Response:
    request, answers = context.request, []
    for raw in batch:
        answer = bytearray()

        async def collect(event: Any, answer: bytearray = answer) -> None:
            answer += event.get("body", b"")

        await _answer(context, bytes(raw))(request.scope, request.receive, collect)
        answers += [answer] if answer else []
    body = b"[" + b",".join(answers) + b"]"
    return Response(body, media_type="application/json") if answers else Response(status_code=202)


def _initialize(message: McpMessage) -> Response:
    asked = message.params.get("protocolVersion")
    result: dict[str, Any] = {
        "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "edgeinfer", "version": __version__},
        "instructions": _INSTRUCTIONS,
    }
    return _result(message.id, result, {"mcp-session-id": secrets.token_hex(16)})


def _call_key(context: RequestContext, number: Id) -> tuple[str, str, Id]:
    return context.key, context.headers.get("mcp-session-id", ""), number


def _result(number: Id, result: Any, headers: dict[str, str] | None = None) -> Response:
    return json_reply(McpReply(id=number, result=result), headers=headers)


def _failure(number: Id, code: int, message: str, status: int = 200) -> Response:
    return json_reply(McpReply(id=number, error={"code": code, "message": message}), status)


def _content(text: str, *, is_error: bool = False, **structured: Any) -> dict[str, Any]:
    content: dict[str, Any] = {"content": [{"type": "text", "text": text}], "isError": is_error}
    return content | ({"structuredContent": structured} if structured else {})


def _sees_files(context: RequestContext) -> bool:
    """Return whether a client is a program of the operator, over TCP on this machine.

    Root, or a client of a unix socket, may be a proxy (nginx, Ray) for clients of its own.
    """
    here = context.request.scope.get("connection")
    return context.is_admin and here is not None and here.uid == os.getuid()


def _tool_names(context: RequestContext) -> list[str]:
    sees_files, has_page = _sees_files(context), context.endpoint.web is not None
    is_offered = {"read_document": sees_files, "search_conversations": sees_files and has_page}
    return [name for name in _TOOLS if is_offered.get(name, True)]


def _describe(name: str) -> dict[str, Any]:
    kind = _TOOLS[name]
    schema = msgspec.json.schema(kind)["$defs"][kind.__name__]
    description = schema.pop("description")
    # agents call what only reads unasked, and may send the user's files and conversations elsewhere
    claims = {"readOnlyHint": kind is Embed, "openWorldHint": False}
    return {"name": name, "description": description, "inputSchema": schema, "annotations": claims}


def _start_call(context: RequestContext, message: McpMessage) -> Response:
    name = message.params.get("name")
    if name not in _tool_names(context):
        return _failure(message.id, _PARAMS, f"there is no tool {name}")
    try:
        arguments = msgspec.convert(message.params.get("arguments") or {}, _TOOLS[name])
    except msgspec.ValidationError as error:
        return _result(message.id, _content(str(error), is_error=True))
    return _Call(context, message.id, arguments)


class _Call(Response):
    """A call of a tool, which a notification or the end of the connection cancels."""

    background = None

    def __init__(self, context: RequestContext, number: Id, arguments: Any) -> None:
        self._context = context
        self._id = number
        self._arguments = arguments

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = _call_key(self._context, self._id)
        cancelled = _running[key] = asyncio.Event()

        async def receiving() -> Any:
            message = await unless(cancelled.wait(), receive())
            return {"type": "http.disconnect"} if cancelled.is_set() else message

        async def sending(message: Any) -> None:
            if not cancelled.is_set():
                await send(message)

        try:
            await (await self._reply())(scope, receiving, sending)
        except Exception as error:
            if self._context.status:
                raise
            problem = self._context.endpoint.problem_of(error, self._context.id)
            self._context.outcome = problem.code or ""
            await _result(self._id, _content(problem.message, is_error=True))(scope, receive, send)
        finally:
            _running.pop(key, None)
        if cancelled.is_set() and not self._context.status:
            await Response(status_code=202)(scope, receive, send)

    async def _reply(self) -> Response:
        match self._arguments:
            case Ask():
                return await self._ask(self._arguments)
            case Embed(texts=texts, model=model):
                return _result(self._id, await self._with_engine(model, lambda e: _embed(e, texts)))
            case SearchConversations(words=words, limit=limit):
                matches = await self._context.endpoint.web.conversations.use(
                    lambda store: store.search(words, limit)
                )
                lines = [f"{m.title} ({m.model}, {m.turns} turns)\n{m.snippet}" for m in matches]
                rows = msgspec.to_builtins(matches)
                return _result(self._id, _content("\n\n".join(lines) or "None.", conversations=rows))
            case ReadDocument(path=path, model=model):
                return await self._read(path, model)
        raise AssertionError

    async def _with_engine(self, model: str | None, work: Callable[[Engine], Any]) -> Any:
        return await with_engine(self._context, ModelFields(model=model), work)

    async def _ask(self, asked: Ask) -> Response:
        document = [await self._attachment(asked.document)] if asked.document else []
        return await answer(
            self._context,
            ModelFields(model=asked.model),
            lambda info: [_request(asked.question, document, info, asked.max_tokens)],
            self._renderer,
            stream=False,
        )

    def _renderer(self, model: str, info: EngineInfo) -> ChatRenderer:
        return _AskRenderer(self._id, self._context.id, model, info, ChatRequest(messages=[]))

    async def _attachment(self, path: str) -> Attachment:
        """Read a file. Raises Problem 403, and EdgeInferError for one that is no text."""
        if not _sees_files(self._context):
            raise Problem(403, "Files are read for this machine's operator.", code="admin_only")
        return await self._context.endpoint.in_thread(_read_document, path)

    async def _read(self, path: str, model: str | None) -> Response:
        document, context = [await self._attachment(path)], self._context

        def prefix_of(engine: Engine) -> GenerateRequest:
            return prefill_request(engine, lambda text: _request(text, document, engine.info))

        prefix: GenerateRequest = await self._with_engine(model, prefix_of)
        spec = GenerationSpec(None, lambda info: [prefix], self._renderer)
        context.endpoint.enter(context.key)
        try:
            submitted = await start(context, spec)
        except BaseException:
            context.endpoint.leave(context.key)
            raise
        task = asyncio.create_task(_prefilled(context, submitted))
        _reading.add(task)
        task.add_done_callback(self._ended)
        n_tokens = len(prefix.prompt or ())
        message = f"The model reads {document[0].name} in the background: {n_tokens:,} tokens."
        return _result(self._id, _content(message, tokens=n_tokens))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        _reading.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._context.endpoint.log.warning("read-failed", message=str(error))


async def _prefilled(context: RequestContext, task: GenerationTask) -> None:
    endpoint = context.endpoint
    endpoint.running.update(task.generations)
    try:
        async for _ in task.generations[0]:
            pass
    except EngineClosedError:
        task.lease.failed()
        raise
    finally:
        endpoint.running.difference_update(task.generations)
        endpoint.unqueue(context.model, 1, context.asker.turn)
        task.lease.release()
        endpoint.leave(context.key)


class _AskRenderer(ChatRenderer):
    def __init__(self, number: Id, *rest: Any) -> None:
        super().__init__(*rest)
        self._number = number

    def whole(self, answers: list[Collected]) -> bytes:
        return msgspec.json.encode(McpReply(id=self._number, result=_content(answers[0].text)))


def _read_document(typed: str) -> Attachment:
    """Read a file that is not hidden. Raises InvalidRequestError, UsageError."""
    try:
        path = Path(typed).expanduser()
        real = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise InvalidRequestError(f"{typed}: {error}", param="path") from error
    if not path.is_absolute():
        raise InvalidRequestError(f"{typed} is not an absolute path", param="path")
    if any(name.startswith(".") for name in real.parts):
        raise InvalidRequestError(
            f"{typed} is hidden, or in a hidden folder, and is not read for other programs",
            hint="copy it into another folder",
            param="path",
        )
    document = attachments.read(real)
    if document.is_picture:
        raise InvalidRequestError(f"{typed} is a picture", param="path")
    return document


def _request(
    question: str, document: Sequence[Attachment], info: EngineInfo, max_tokens: int | None = None
) -> GenerateRequest:
    prompt = attachments.with_attachments(question, document)
    return infer_request(InferRequest(prompt=prompt, max_tokens=max_tokens), info)


def _embed(engine: Engine, texts: Sequence[str]) -> dict[str, Any]:
    if not engine.info.can_embed:
        raise InvalidRequestError(f"{engine.info.model} makes no embeddings", param="model")
    vectors = engine.embed(texts)
    return _content(f"{len(vectors)} vectors of {len(vectors[0])} numbers", embeddings=vectors)


def _refused(problem: Problem, request_id: str) -> bytes:
    return bytes(_failure(None, _INTERNAL, problem.message).body)


MCP = Dialect(
    name="mcp",
    operations=ROUTES,
    error_type=McpReply,
    error_body=_refused,
    error_events=_refused,
    answers_any_name=False,
)
