"""The endpoint's routes without a socket, for batches: `edgeinfer batch` and /v1/batches."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from starlette.types import ASGIApp

from edgeinfer.platform.paths import private_dir
from edgeinfer.server.problems import Problem, too_many
from edgeinfer.server.wire_types import Reply

#: Pauses between the tries of a request that failed in a way that may pass.
_BUSY_PAUSES_S = (0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0)
_DEFECT_PAUSES_S = (0.4, 1.6)
#: Statuses of an endpoint that is busy or loading; a 500 is a defect, which rarely passes.
_BUSY = (429, 503)
#: Headers by which a client is known and admitted.
_IDENTITY = ("host", "authorization", "x-api-key")

BatchUrl = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]


class BatchLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request of a batch."""

    custom_id: str
    url: BatchUrl
    body: dict[str, Any]
    method: Literal["POST"] = "POST"


#: Makes an error of a line's number and what is wrong with it.
Refuse = Callable[[int, str], Exception]


def read_lines(raw: Iterable[bytes], refuse: Refuse, url: str = "") -> list[BatchLine]:
    """Decode a batch's requests, one a line, all for `url` if given. Raises what `refuse` returns."""
    decoder = msgspec.json.Decoder(BatchLine)
    first: dict[str, int] = {}
    lines = []
    for number, text in enumerate(raw, 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise refuse(number, f"{error}; a line is {{custom_id, method, url, body}}") from error
        if line.body.get("stream"):
            raise refuse(number, 'a batch does not stream: leave "stream" out')
        if url and line.url != url:
            raise refuse(number, f"its url must be {url}")
        before = first.setdefault(line.custom_id, number)
        if before != number:
            raise refuse(number, f"custom_id {line.custom_id!r} is also on line {before}")
        lines.append(line)
    return lines


class BatchReply(msgspec.Struct, frozen=True):
    """The answer of a route."""

    status: int
    request_id: str
    body: bytes


async def post(app: ASGIApp, path: str, body: bytes, asker: Mapping[str, str]) -> BatchReply:
    """POST `body` as JSON. Raises nothing of its own: failures are answers."""
    import httpx2  # 75–120 ms, for batches alone

    identity = {name: asker[name] for name in _IDENTITY if name in asker}
    sent = {"host": "localhost", "content-type": "application/json"} | identity
    headers = httpx2.Headers(sent, encoding="latin-1")
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, timeout=None, trust_env=False) as client:
        reply = await client.post(f"http://localhost{path}", content=body, headers=headers)
    return BatchReply(reply.status_code, reply.headers["x-request-id"], reply.content)


async def ask_again(app: ASGIApp, headers: Mapping[str, str], line: BatchLine) -> BatchReply:
    """POST `line` until it succeeds or no retry is left; return the last answer."""
    body = msgspec.json.encode(line.body)
    tries = 0
    while True:
        reply = await post(app, line.url, body, headers)
        pauses_s = _BUSY_PAUSES_S if reply.status in _BUSY else _DEFECT_PAUSES_S
        if not may_pass(reply) or tries >= len(pauses_s):
            return reply
        await asyncio.sleep(pauses_s[tries])
        tries += 1


def may_pass(reply: BatchReply) -> bool:
    """Return whether a retry may succeed: the endpoint failed, not the request."""
    return reply.status in _BUSY or reply.status >= 500


def answer_line(line: BatchLine, reply: BatchReply) -> bytes:
    """Encode a line of the output file."""
    answer = {
        "id": f"batch_{reply.request_id}",
        "custom_id": line.custom_id,
        "response": {
            "status_code": reply.status,
            "request_id": reply.request_id,
            "body": msgspec.Raw(reply.body),
        },
        "error": None,
    }
    return msgspec.json.encode(answer) + b"\n"


#: Of one key: the sizes of all files together (bytes), and how long each is kept (seconds).
MOST_BYTES = 1 << 30
KEPT_S = 30 * 86_400
#: Requests of a batch at once: others find room beside them.
_AT_ONCE = 4
_MOST_RUNNING = 16
_ID = re.compile(r"(?:file-|batch_)[0-9a-f]{24}")

R = TypeVar("R", bound=Reply)
Ask = Callable[[BatchLine], Awaitable[BatchReply]]


Purpose = Literal["batch", "batch_output"]


class FileObject(Reply, frozen=True, kw_only=True):
    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class BatchCounts(Reply, frozen=True, kw_only=True):
    total: int
    completed: int = 0
    failed: int = 0


class BatchObject(Reply, frozen=True, kw_only=True):
    """A batch. Every answer is in the output file, refused requests with their status."""

    id: str
    endpoint: str
    input_file_id: str
    output_file_id: str
    created_at: int
    in_progress_at: int
    request_counts: BatchCounts
    status: Literal["in_progress", "completed", "cancelled", "failed"] = "in_progress"
    completed_at: int | None = None
    cancelled_at: int | None = None
    failed_at: int | None = None
    metadata: dict[str, str] | None = None
    completion_window: Literal["24h"] = "24h"
    error_file_id: None = None
    object: Literal["batch"] = "batch"


class Batches:
    """The files under `root`, and the batches that run."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._running: dict[str, tuple[asyncio.Task[None], BatchObject]] = {}

    def folder(self, owner: str) -> Path:
        """Return the folder of a key, without files that have expired."""
        name = hashlib.blake2b(owner.encode(), digest_size=8).hexdigest()
        folder = private_dir(private_dir(self._root) / name)
        for path in folder.iterdir():
            if path.stat().st_mtime < time.time() - KEPT_S:
                path.unlink(missing_ok=True)
        return folder

    def begin(self, ask: Ask, folder: Path, batch: BatchObject, lines: list[BatchLine]) -> None:
        """Answer the lines in the background. Raises Problem 429 beyond `_MOST_RUNNING` batches."""
        if len(self._running) >= _MOST_RUNNING:
            raise too_many(f"{_MOST_RUNNING} batches run already.", 60)
        write_record(folder, batch)
        task = asyncio.create_task(self._run(ask, folder, batch.id, lines))
        self._running[batch.id] = (task, batch)

    async def _run(self, ask: Ask, folder: Path, name: str, lines: list[BatchLine]) -> None:
        todo, status = iter(lines), "failed"
        output = self._running[name][1].output_file_id
        try:
            with (folder / f"{output}.jsonl").open("wb", buffering=0) as file:
                async with asyncio.TaskGroup() as group:
                    for _ in range(_AT_ONCE):
                        group.create_task(self._answer(ask, name, todo, file))
            status = "completed"
        except asyncio.CancelledError:
            status = "cancelled"
        except ExceptionGroup as several:  # a full disk, or too many answers
            if several.split(OSError)[1] is not None:
                raise
        finally:
            now = int(time.time())
            _, batch = self._running.pop(name)
            ended: Any = {"status": status, f"{status}_at": now}
            write_record(folder, msgspec.structs.replace(batch, **ended))
            size = (folder / f"{output}.jsonl").stat().st_size
            write_record(folder, new_file(output, size, f"{name}_output.jsonl", "batch_output"))

    async def _answer(self, ask: Ask, name: str, todo: Iterator[BatchLine], file: Any) -> None:
        for line in todo:
            reply = await ask(line)
            file.write(answer_line(line, reply))
            if file.tell() > MOST_BYTES:
                raise OSError(errno.EFBIG, "the answers are too many")
            task, batch = self._running[name]
            counts = batch.request_counts
            is_failed = reply.status >= 400
            counts = msgspec.structs.replace(
                counts, completed=counts.completed + (not is_failed), failed=counts.failed + is_failed
            )
            self._running[name] = (task, msgspec.structs.replace(batch, request_counts=counts))

    def batch(self, folder: Path, name: str) -> BatchObject:
        """Raises Problem 404. One that was running when its process ended has failed."""
        batch = read_record(folder, name, BatchObject)
        if name in self._running:
            return self._running[name][1]
        if batch.status == "in_progress":
            batch = msgspec.structs.replace(batch, status="failed", failed_at=batch.in_progress_at)
        return batch

    async def cancel(self, name: str) -> None:
        """Cancel a batch if it is running."""
        if name in self._running:
            task, _ = self._running[name]
            task.cancel()
            await asyncio.wait([task])


def new_file(name: str, size: int, filename: str, purpose: Purpose) -> FileObject:
    """Make the record of a new file."""
    now = int(time.time())
    return FileObject(
        id=name, bytes=size, created_at=now, expires_at=now + KEPT_S, filename=filename, purpose=purpose
    )


def write_record(folder: Path, record: FileObject | BatchObject) -> None:
    """Write a record under its id."""
    made = folder / f"{record.id}.{secrets.token_hex(4)}"
    made.write_bytes(msgspec.json.encode(record))
    made.replace(folder / f"{record.id}.json")


def read_record(folder: Path, name: str, kind: type[R]) -> R:
    """Raises Problem 404."""
    try:
        if _ID.fullmatch(name):
            return msgspec.json.decode((folder / f"{name}.json").read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        pass
    raise Problem(404, f"There is no '{name[:64]}' here.", param="id", code="not_found")
