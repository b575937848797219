"""Routes of OpenAI's files and batches."""

from __future__ import annotations

import asyncio
import functools
import re
import secrets
import time
from pathlib import Path
from typing import ClassVar, Literal

from starlette.responses import Response

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
from edgeinfer.server.context import RequestContext
from edgeinfer.server.dialect import RouteTable
from edgeinfer.server.problems import Problem, shutting_down
from edgeinfer.server.request_body import read_body
from edgeinfer.server.wire_types import Reply, Wire

ROUTES = RouteTable()

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
