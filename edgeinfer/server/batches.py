"""The endpoint's routes without a socket, for batches: `edgeinfer batch` and /v1/batches."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hashlib
import itertools
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar

import msgspec

from edgeinfer.platform.disk import new_file
from edgeinfer.platform.paths import private_dir
from edgeinfer.server.callers import Caller
from edgeinfer.server.problems import Problem, too_many
from edgeinfer.server.wire_types import Reply

if TYPE_CHECKING:
    from starlette.types import ASGIApp

#: Pauses between the tries of a request that failed in a way that may pass.
_BUSY_PAUSES_S = (0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0)
_DEFECT_PAUSES_S = (0.4, 1.6)
#: Statuses of an endpoint that is busy or loading; a 500 is a defect, which rarely passes.
_BUSY = (429, 503)

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


async def post(app: ASGIApp, path: str, body: bytes, caller: Caller) -> BatchReply:
    """POST `body` as JSON for `caller`. Raises nothing of its own: failures are answers."""
    import httpx2  # 75–120 ms, for batches alone

    async def app_for_caller(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"caller": caller}, receive, send)

    headers = {"host": "localhost", "content-type": "application/json"}
    transport = httpx2.ASGITransport(app_for_caller)
    async with httpx2.AsyncClient(transport=transport, timeout=None, trust_env=False) as client:
        reply = await client.post(f"http://localhost{path}", content=body, headers=headers)
    return BatchReply(reply.status_code, reply.headers["x-request-id"], reply.content)


async def ask_again(app: ASGIApp, caller: Caller, line: BatchLine) -> BatchReply:
    """POST `line` until it succeeds or no retry is left; return the last answer."""
    body = msgspec.json.encode(line.body)
    for n_tries in itertools.count():
        reply = await post(app, line.url, body, caller)
        pauses_s = _BUSY_PAUSES_S if reply.status in _BUSY else _DEFECT_PAUSES_S
        if not may_pass(reply) or n_tries >= len(pauses_s):
            break
        await asyncio.sleep(pauses_s[n_tries])
    return reply


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


#: Of one caller: the sizes of all files together (bytes), their number, and how long each is kept (s).
MOST_BYTES = 1 << 30
MOST_FILES = 1000
KEPT_S = 30 * 86_400
#: Requests of a batch at once: others find room beside them.
_AT_ONCE = 4
#: Batches at once, of all and of one API key.
_MOST_RUNNING = 16
_MOST_OF_KEY = 4
_ID = re.compile(r"(?:file-|batch_)[0-9a-f]{24}")

R = TypeVar("R", bound="FileObject | BatchObject")
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


def new_record(name: str, size: int, filename: str, purpose: Purpose) -> FileObject:
    """Make the record of a new file."""
    now = int(time.time())
    return FileObject(
        id=name, bytes=size, created_at=now, expires_at=now + KEPT_S, filename=filename, purpose=purpose
    )


class Folder:
    """Files and batches of one caller. Its methods wait for the disk: call them in threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._used_bytes = 0

    def add(self, content: bytes, filename: str) -> FileObject:
        """Store an uploaded file. Raises Problem 413 beyond a caller's number and size of files."""
        record = new_record(f"file-{secrets.token_hex(12)}", len(content), filename[:256], "batch")
        with self._lock:  # of two uploads at once the second counts the first
            self._check_room(len(content))
            with new_file(self._content(record.id), 0o600) as file:
                file.write(content)
            self.write(record)
        return record

    def lines(self, name: str) -> list[bytes]:
        """Return the lines of an uploaded file. Raises Problem 404, 400 and 413 if no answers fit."""
        with self._lock:
            self._check_room()
        if self.read(name, FileObject).purpose != "batch":  # answers may have a gigabyte
            raise Problem(
                400, "This is not an uploaded file.", param="input_file_id", code="invalid_value"
            )
        return self._content(name).read_bytes().splitlines()

    def _content(self, name: str) -> Path:
        return self._path / f"{name}.jsonl"

    def _check_room(self, size: int = 0) -> None:
        n_files = self._count()
        if self._used_bytes + size > MOST_BYTES or n_files >= MOST_FILES:
            message = f"At most {MOST_FILES} files with {MOST_BYTES >> 20} MiB in all: "
            message += "delete some with DELETE /v1/files/ID."
            raise Problem(413, message, param="file", code="request_too_large")

    def _count(self) -> int:
        """Delete expired files; return the number of the others, and count their bytes."""
        sizes = []
        for path in self._path.iterdir():
            with contextlib.suppress(FileNotFoundError):  # renamed or deleted meanwhile
                status = path.stat()
                if _is_expired(status):
                    path.unlink()
                elif path.suffix == ".jsonl":
                    sizes.append(status.st_size)
        self._used_bytes = sum(sizes)
        return len(sizes)

    def open_output(self, name: str) -> BinaryIO:
        """Open the file of a batch's answers."""
        private = functools.partial(os.open, mode=0o600)
        return open(self._content(name), "wb", buffering=0, opener=private)

    def append(self, file: BinaryIO, line: bytes) -> None:
        """Write a line of answers. Raises OSError beyond the size of a caller's files."""
        with self._lock:
            if self._used_bytes + len(line) > MOST_BYTES:
                self._count()  # some may have been deleted
            if self._used_bytes + len(line) > MOST_BYTES:
                raise OSError(errno.EFBIG, "the answers exceed the size limit of files")
            self._used_bytes += len(line)
            file.write(line)

    def end(self, batch: BatchObject, status: str) -> None:
        """Write the records of a batch that ended and of its answers. Raises OSError."""
        ended: Any = {"status": status, f"{status}_at": int(time.time())}
        self.write(msgspec.structs.replace(batch, **ended))
        name, size = batch.output_file_id, self._content(batch.output_file_id).stat().st_size
        self.write(new_record(name, size, f"{batch.id}_output.jsonl", "batch_output"))

    def content(self, name: str) -> Path:
        """Return the path of a file's content. Raises Problem 404."""
        return self._content(self.read(name, FileObject).id)

    def delete(self, name: str) -> None:
        """Delete a file. Raises Problem 404."""
        content = self.content(name)
        content.with_suffix(".json").unlink(missing_ok=True)
        content.unlink(missing_ok=True)

    def write(self, record: FileObject | BatchObject) -> None:
        """Write a record under its id."""
        with new_file(self._path / f"{record.id}.json", 0o600) as file:
            file.write(msgspec.json.encode(record))

    def read(self, name: str, kind: type[R]) -> R:
        """Return a record that has not expired. Raises Problem 404."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            path = self._path / f"{name}.json"
            if _ID.fullmatch(name) and not _is_expired(path.stat()):
                return msgspec.json.decode(path.read_bytes(), type=kind)
        raise Problem(404, f"There is no '{name[:64]}' here.", param="id", code="not_found")

    def records(self, kind: type[R]) -> list[R]:
        """Return all records of a kind, the newest first."""
        prefix = "file-" if kind is FileObject else "batch_"
        records = []
        for path in self._path.glob(f"{prefix}*.json"):
            with contextlib.suppress(Problem):
                records.append(self.read(path.stem, kind))
        return sorted(records, key=lambda record: (record.created_at, record.id), reverse=True)


def _is_expired(status: os.stat_result) -> bool:
    return status.st_mtime < time.time() - KEPT_S


class _Running(msgspec.Struct, eq=False):
    caller: Caller
    folder: Folder
    batch: BatchObject
    task: asyncio.Task[None] | None = None

    def count(self, reply: BatchReply) -> None:
        counts = self.batch.request_counts
        name = "failed" if reply.status >= 400 else "completed"
        counts = msgspec.structs.replace(counts, **{name: getattr(counts, name) + 1})
        self.batch = msgspec.structs.replace(self.batch, request_counts=counts)


class Batches:
    """The files under `root`, and the batches that run."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: dict[str, Folder] = {}
        self._running: dict[str, _Running] = {}

    def folder(self, owner: str) -> Folder:
        """Return the folder of a caller."""
        if owner not in self._folders:
            name = hashlib.blake2b(owner.encode(), digest_size=8).hexdigest()
            self._folders[owner] = Folder(private_dir(private_dir(self._root) / name))
        return self._folders[owner]

    def check_room(self, caller: Caller) -> None:
        """Raises Problem 429 if `caller` may begin no further batch now."""
        own = sum(running.caller == caller for running in self._running.values())
        if len(self._running) >= _MOST_RUNNING:
            raise too_many(f"{_MOST_RUNNING} batches run already.", 60)
        if caller.turn and own >= _MOST_OF_KEY:
            raise too_many(f"{own} batches of this key run already.", 60)

    async def begin(
        self, app: ASGIApp, caller: Caller, batch: BatchObject, lines: Sequence[BatchLine]
    ) -> BatchObject:
        """Answer the lines in the background. Raises Problem 429 beyond the batches at once."""
        self.check_room(caller)
        running = self._running[batch.id] = _Running(caller, self.folder(caller.name), batch)
        try:
            await asyncio.to_thread(running.folder.write, batch)
        except BaseException:
            del self._running[batch.id]
            raise
        running.task = asyncio.create_task(self._run(app, running, lines))
        return batch

    async def _run(self, app: ASGIApp, running: _Running, lines: Sequence[BatchLine]) -> None:
        todo, status = iter(lines), "failed"
        try:
            output = running.batch.output_file_id
            with await asyncio.to_thread(running.folder.open_output, output) as file:
                async with asyncio.TaskGroup() as group:
                    for _ in range(_AT_ONCE):
                        group.create_task(_answer(app, running, todo, file))
            status = "completed"
        except asyncio.CancelledError:
            status = "cancelled"
        except ExceptionGroup as several:  # a full disk, or too many answers
            if several.split(OSError)[1] is not None:
                raise
        finally:
            del self._running[running.batch.id]
            running.folder.end(running.batch, status)

    def batch(self, owner: str, name: str) -> BatchObject:
        """Raises Problem 404. One that was running when its process ended has failed."""
        return self._now(self.folder(owner).read(name, BatchObject))

    def batches(self, owner: str) -> list[BatchObject]:
        """Return a caller's batches, the newest first."""
        return [self._now(batch) for batch in self.folder(owner).records(BatchObject)]

    def _now(self, batch: BatchObject) -> BatchObject:
        running = self._running.get(batch.id)
        if running is not None:
            return running.batch
        if batch.status == "in_progress":
            batch = msgspec.structs.replace(batch, status="failed", failed_at=batch.in_progress_at)
        return batch

    async def cancel(self, name: str) -> None:
        """Cancel a batch if it is running."""
        running = self._running.get(name)
        if running is not None and running.task is not None:
            running.task.cancel()
            await asyncio.wait([running.task])


async def _answer(app: ASGIApp, running: _Running, todo: Iterator[BatchLine], file: BinaryIO) -> None:
    for line in todo:
        reply = await ask_again(app, running.caller, line)
        await asyncio.to_thread(running.folder.append, file, answer_line(line, reply))
        running.count(reply)
