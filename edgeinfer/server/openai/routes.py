"""OpenAI's routes: answers, embeddings, models, files and batches."""

from __future__ import annotations

import asyncio
import base64
import functools
import re
import secrets
import struct
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, Literal

import msgspec
from starlette.responses import Response

from edgeinfer.errors import InvalidRequestError
from edgeinfer.runtime.interface import Engine
from edgeinfer.server.batches import (
    MOST_BYTES,
    BatchCounts,
    Batches,
    BatchObject,
    BatchUrl,
    FileObject,
    ask_again,
    new_file,
    read_lines,
    read_record,
    write_record,
)
from edgeinfer.server.context import RequestContext, with_engine
from edgeinfer.server.dialect import Dialect, RouteTable
from edgeinfer.server.generation import answer
from edgeinfer.server.model_pool import AvailableModel
from edgeinfer.server.openai import translate, wire
from edgeinfer.server.openai.render import ChatRenderer, CompletionRenderer, error_body, error_events
from edgeinfer.server.problems import Problem, shutting_down
from edgeinfer.server.request_body import read_body
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


_FIELD = re.compile(rb'[ ;]name="([^"]*)"(?:; *filename="([^"]*)")?')


class FileDeleted(Reply, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class BatchRequest(Wire, frozen=True, kw_only=True):
    """POST /v1/batches."""

    hints: ClassVar = frozenset({"output_expires_after"})

    input_file_id: str
    endpoint: BatchUrl
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None


def _place(context: RequestContext) -> tuple[Batches, Path]:
    batches = context.endpoint.batches
    if batches is None:
        raise Problem(400, "No files are kept here.", code="files_not_kept")
    return batches, batches.folder(context.key)


@ROUTES.post("/v1/files", uses_model=False)
async def upload(context: RequestContext) -> FileObject:
    """Keep a file of requests, a multipart form with `file` and `purpose`."""
    _, folder = _place(context)
    form = _form(context.headers.get("content-type", ""), await read_body(context.request))
    content, filename = form.get("file", (b"", ""))
    if form.get("purpose", (b"", ""))[0] != b"batch" or not content:
        message = "Send the form fields 'file', which is not empty, and 'purpose', which is 'batch'."
        raise Problem(400, message, param="purpose", code="invalid_value")
    if sum(path.stat().st_size for path in folder.iterdir()) + len(content) > MOST_BYTES:
        message = f"All files together may have {MOST_BYTES} bytes: DELETE some under /v1/files."
        raise Problem(413, message, param="file", code="request_too_large")
    record = new_file(f"file-{secrets.token_hex(12)}", len(content), filename[:256], "batch")
    await asyncio.to_thread((folder / f"{record.id}.jsonl").write_bytes, content)
    write_record(folder, record)
    return record


def _form(content_type: str, raw: bytes) -> dict[str, tuple[bytes, str]]:
    """Parse a multipart form into fields with file names. No client's boundary is in its content."""
    found = re.search(r'multipart/form-data;.*boundary="?([^";]+)', content_type, re.IGNORECASE)
    fields = {}
    for part in raw.split(b"--" + found[1].encode())[1:-1] if found else ():
        head, _, content = part.partition(b"\r\n\r\n")
        if named := _FIELD.search(head):
            filename = (named[2] or b"").decode("utf-8", "replace")
            fields[named[1].decode("utf-8", "replace")] = (content.removesuffix(b"\r\n"), filename)
    return fields


@ROUTES.get("/v1/files/{id}")
async def one_file(context: RequestContext) -> FileObject:
    """A file of requests or answers."""
    _, folder = _place(context)
    return read_record(folder, context.path_id, FileObject)


@ROUTES.get("/v1/files/{id}/content", reply_type="application/jsonl")
async def content_of(context: RequestContext) -> Response:
    """The lines of a file."""
    _, folder = _place(context)
    record = read_record(folder, context.path_id, FileObject)
    content = await asyncio.to_thread((folder / f"{record.id}.jsonl").read_bytes)
    return Response(content, media_type="application/jsonl")


@ROUTES.delete("/v1/files/{id}")
async def delete_file(context: RequestContext) -> FileDeleted:
    """Delete a file."""
    _, folder = _place(context)
    record = read_record(folder, context.path_id, FileObject)
    for ending in ("json", "jsonl"):
        (folder / f"{record.id}.{ending}").unlink(missing_ok=True)
    return FileDeleted(id=record.id)


@ROUTES.post("/v1/batches", uses_model=False)
async def create(context: RequestContext, body: BatchRequest) -> BatchObject:
    """Answer a file of requests in the background."""
    batches, folder = _place(context)
    if context.endpoint.draining:
        raise shutting_down()
    source = read_record(folder, body.input_file_id, FileObject)
    raw = await asyncio.to_thread((folder / f"{source.id}.jsonl").read_bytes)
    lines = await asyncio.to_thread(read_lines, raw.splitlines(), _refuse_line, body.endpoint)
    now = int(time.time())
    batch = BatchObject(
        id=f"batch_{secrets.token_hex(12)}",
        endpoint=body.endpoint,
        input_file_id=source.id,
        output_file_id=f"file-{secrets.token_hex(12)}",
        created_at=now,
        in_progress_at=now,
        request_counts=BatchCounts(total=len(lines)),
        metadata=body.metadata,
    )
    ask = functools.partial(ask_again, context.request.scope["app"], context.headers)
    batches.begin(ask, folder, batch, lines)
    return batch


def _refuse_line(number: int, why: str) -> Problem:
    return Problem(400, f"Line {number}: {why}.", param="input_file_id", code="invalid_value")


@ROUTES.get("/v1/batches/{id}")
async def one_batch(context: RequestContext) -> BatchObject:
    """Report a batch's progress."""
    batches, folder = _place(context)
    return batches.batch(folder, context.path_id)


@ROUTES.post("/v1/batches/{id}/cancel", uses_model=False)
async def cancel(context: RequestContext) -> BatchObject:
    """End a batch; what it has answered is kept."""
    batches, folder = _place(context)
    batch = batches.batch(folder, context.path_id)
    await batches.cancel(batch.id)
    return batches.batch(folder, batch.id)


OPENAI = Dialect(
    name="openai",
    error_type=wire.ErrorReply,
    error_body=error_body,
    error_events=error_events,
    operations=ROUTES,
)
