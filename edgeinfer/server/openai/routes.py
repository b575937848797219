"""OpenAI's routes: answers, embeddings, models, files and batches."""

from __future__ import annotations

import asyncio
import base64
import importlib
import secrets
import struct
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta
from starlette.responses import FileResponse, Response

from edgeinfer.errors import InvalidRequestError
from edgeinfer.runtime.interface import Engine
from edgeinfer.server.batches import (
    BatchCounts,
    Batches,
    BatchLine,
    BatchObject,
    BatchUrl,
    FileObject,
    Folder,
    read_lines,
)
from edgeinfer.server.context import RequestContext, with_engine
from edgeinfer.server.dialect import Dialect, RouteTable
from edgeinfer.server.generation import answer
from edgeinfer.server.model_pool import AvailableModel
from edgeinfer.server.openai import translate, wire
from edgeinfer.server.openai.render import ChatRenderer, CompletionRenderer, error_body, error_events
from edgeinfer.server.problems import Problem, shutting_down
from edgeinfer.server.request_body import read_body, read_form
from edgeinfer.server.wire_types import PromptUsage, Reply, Wire

ROUTES = RouteTable()

#: Texts of one request, as many as OpenAI takes; the engine embeds some at a time.
_MAX_EMBEDDED = 2048


@ROUTES.post("/v1/chat/completions", reply=wire.ChatCompletion, streams=True)
async def chat_completions(context: RequestContext, body: wire.ChatRequest) -> Response:
    """Answer a conversation."""
    return await answer(
        context,
        body,
        lambda info: translate.chat(body, info),
        lambda model, info: ChatRenderer(f"chatcmpl-{context.plain_id}", model, info, body),
        stream=bool(body.stream),
    )


@ROUTES.post("/v1/completions", reply=wire.Completion, streams=True)
async def completions(context: RequestContext, body: wire.CompletionRequest) -> Response:
    """Continue a text."""
    prompts = translate.prompts(body.prompt, "prompt")
    return await answer(
        context,
        body,
        lambda info: translate.completion(body, info),
        lambda model, info: CompletionRenderer(f"cmpl-{context.plain_id}", model, info, body, prompts),
        stream=bool(body.stream),
    )


@ROUTES.post("/v1/embeddings")
async def embeddings(context: RequestContext, body: wire.EmbeddingRequest) -> wire.EmbeddingReply:
    """Embed texts."""
    texts = translate.prompts(body.input, "input", _MAX_EMBEDDED)

    def work(engine: Engine) -> wire.EmbeddingReply:
        info = engine.info
        if not info.can_embed:
            raise InvalidRequestError(f"{info.model} makes no embeddings", param="model")
        if body.dimensions not in (None, info.n_embd):
            message = f"this model's embeddings have {info.n_embd} dimensions"
            raise InvalidRequestError(message, param="dimensions")
        vectors = [_encoded(vector, body.encoding_format) for vector in engine.embed(texts)]
        data = [wire.Embedding(index=i, embedding=vector) for i, vector in enumerate(vectors)]
        n_tokens = sum(
            len(engine.tokenize(text, add_special=True)) if isinstance(text, str) else len(text)
            for text in texts
        )
        usage = PromptUsage(prompt_tokens=n_tokens, total_tokens=n_tokens)
        return wire.EmbeddingReply(data=data, model=context.model, usage=usage)

    reply = await with_engine(context, body, work)
    context.prompt_tokens = reply.usage.prompt_tokens
    return reply


def _encoded(vector: Sequence[float], encoding: str | None) -> str | list[float]:
    if encoding != "base64":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


@ROUTES.get("/v1/models")
async def list_models(context: RequestContext) -> wire.ModelList:
    """The pulled models."""
    pulled = await context.endpoint.in_thread(context.endpoint.models.pulled)
    cards = [_card(context, model) for model in pulled]
    return wire.ModelList(
        data=cards,
        models=[_capabilities(card) for card in cards],
        first_id=cards[0].id,
        last_id=cards[-1].id,
    )


def _capabilities(card: wire.ModelCard) -> wire.ModelCapabilities:
    sees = "image" in card.architecture.input_modalities
    capabilities = ["completion", *["multimodal"] * sees]
    return wire.ModelCapabilities(name=card.id, model=card.id, capabilities=capabilities)


@ROUTES.get("/v1/models/{id}")
async def one_model(context: RequestContext) -> wire.ModelCard:
    """One pulled model."""
    name, models = context.path_id, context.endpoint.models
    pulled = {model.name: model for model in await context.endpoint.in_thread(models.pulled)}
    if name not in pulled:
        meant = models.resolve(name)
        pulled[name] = msgspec.structs.replace(pulled[meant], name=name, alias_of=meant)
    return _card(context, pulled[name])


def _card(context: RequestContext, pulled: AvailableModel) -> wire.ModelCard:
    models = context.endpoint.models
    meant = pulled.alias_of or pulled.name
    info = models.info(meant)
    n_ctx = info.n_ctx if info else pulled.n_ctx_train
    can_see = info.can_see if info else pulled.can_see
    return wire.ModelCard(
        id=pulled.name,
        created=pulled.created,
        state=models.state(meant),
        size_bytes=pulled.size_bytes or (info.weights_bytes if info else 0),
        created_at=_stamp(pulled.created),
        display_name=pulled.name,
        n_ctx=info.n_ctx if info else 0,
        max_model_len=n_ctx,
        context_length=n_ctx,
        max_input_tokens=n_ctx,
        meta=wire.ModelMeta(n_ctx_train=pulled.n_ctx_train or (info.n_ctx_train if info else 0)),
        architecture=wire.ModelArchitecture(input_modalities=["text", *["image"] * can_see]),
        sha256=pulled.sha256 or (info.sha256 if info else ""),
        alias_of=pulled.alias_of,
    )


def _stamp(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class FileDeleted(Reply, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class ListQuery(Wire, frozen=True, kw_only=True):
    """A page of a list: at most `limit` items behind the one with the id `after`."""

    after: str = ""
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 100
    order: Literal["asc", "desc"] = "desc"
    purpose: str = ""


class Page(Reply, frozen=True, kw_only=True):
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class FileList(Page, frozen=True, kw_only=True):
    data: list[FileObject]


class BatchList(Page, frozen=True, kw_only=True):
    data: list[BatchObject]


class BatchRequest(Wire, frozen=True, kw_only=True):
    """POST /v1/batches."""

    hints: ClassVar = frozenset({"output_expires_after"})

    input_file_id: str
    endpoint: BatchUrl
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None


def _batches(context: RequestContext) -> Batches:
    if context.endpoint.batches is None:
        raise Problem(400, "No files are kept here.", code="files_not_kept")
    return context.endpoint.batches


def _folder(context: RequestContext) -> Folder:
    return _batches(context).folder(context.key)


def _page(records: list[Any], query: ListQuery) -> dict[str, Any]:
    if query.order == "asc":
        records.reverse()
    ids = [record.id for record in records]
    start = ids.index(query.after) + 1 if query.after in ids else 0
    data = records[start : start + query.limit]
    return {
        "data": data,
        "has_more": start + query.limit < len(records),
        "first_id": data[0].id if data else None,
        "last_id": data[-1].id if data else None,
    }


@ROUTES.post("/v1/files", uses_model=False)
async def upload(context: RequestContext) -> FileObject:
    """Keep a file of requests, a multipart form with `file` and `purpose`."""
    folder = _folder(context)
    raw = await read_body(context.request)
    return await asyncio.to_thread(_keep, folder, context.headers.get("content-type", ""), raw)


def _keep(folder: Folder, content_type: str, raw: bytes) -> FileObject:
    form = read_form(content_type, raw)
    content, filename = form.get("file", (b"", ""))
    if form.get("purpose", (b"", ""))[0] != b"batch" or not content:
        message = "Send the form fields 'file', which is not empty, and 'purpose', which is 'batch'."
        raise Problem(400, message, param="purpose", code="invalid_value")
    return folder.add(content, filename)


@ROUTES.get("/v1/files")
async def list_files(context: RequestContext, query: ListQuery) -> FileList:
    """The files of this key, the newest first."""
    records = await asyncio.to_thread(_folder(context).records, FileObject)
    records = [record for record in records if query.purpose in ("", record.purpose)]
    return FileList(**_page(records, query))


@ROUTES.get("/v1/files/{id}")
async def one_file(context: RequestContext) -> FileObject:
    """A file of requests or answers."""
    return await asyncio.to_thread(_folder(context).read, context.path_id, FileObject)


@ROUTES.get("/v1/files/{id}/content", reply_type="application/jsonl")
async def content_of(context: RequestContext) -> Response:
    """The lines of a file."""
    path = await asyncio.to_thread(_folder(context).content, context.path_id)
    return FileResponse(path, media_type="application/jsonl")


@ROUTES.delete("/v1/files/{id}")
async def delete_file(context: RequestContext) -> FileDeleted:
    """Delete a file."""
    await asyncio.to_thread(_folder(context).delete, context.path_id)
    return FileDeleted(id=context.path_id)


@ROUTES.post("/v1/batches", uses_model=False, max_body_bytes=64 << 10)
async def create(context: RequestContext, body: BatchRequest) -> BatchObject:
    """Answer a file of requests in the background."""
    batches, folder = _batches(context), _folder(context)
    if context.endpoint.draining:
        raise shutting_down()
    batches.check_room(context.caller)

    def read() -> list[BatchLine]:
        importlib.import_module("httpx2")  # 75–120 ms, which the event loop has not
        return read_lines(folder.lines(body.input_file_id), _refuse_line, body.endpoint)

    lines = await asyncio.to_thread(read)
    now = int(time.time())
    batch = BatchObject(
        id=f"batch_{secrets.token_hex(12)}",
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        output_file_id=f"file-{secrets.token_hex(12)}",
        created_at=now,
        in_progress_at=now,
        request_counts=BatchCounts(total=len(lines)),
        metadata=body.metadata,
    )
    return await batches.begin(context.request.scope["app"], context.caller, batch, lines)


def _refuse_line(number: int, why: str) -> Problem:
    return Problem(400, f"Line {number}: {why}.", param="input_file_id", code="invalid_value")


@ROUTES.get("/v1/batches")
async def list_batches(context: RequestContext, query: ListQuery) -> BatchList:
    """The batches of this key, the newest first."""
    return BatchList(**_page(await asyncio.to_thread(_batches(context).batches, context.key), query))


@ROUTES.get("/v1/batches/{id}")
async def one_batch(context: RequestContext) -> BatchObject:
    """Report a batch's progress."""
    return await asyncio.to_thread(_batches(context).batch, context.key, context.path_id)


@ROUTES.post("/v1/batches/{id}/cancel", uses_model=False)
async def cancel(context: RequestContext) -> BatchObject:
    """End a batch; what it has answered is kept."""
    batches = _batches(context)
    batch = await asyncio.to_thread(batches.batch, context.key, context.path_id)
    await batches.cancel(batch.id)
    return await asyncio.to_thread(batches.batch, context.key, batch.id)


OPENAI = Dialect(
    name="openai",
    error_type=wire.ErrorReply,
    error_body=error_body,
    error_events=error_events,
    operations=ROUTES,
)
