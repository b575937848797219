"""OpenAI's files and batches: a file of requests is answered in the background into a file of answers.

Each key has a folder of its own. A batch ends with its process; what was answered until then is kept.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from edgeinfer.platform.paths import private_dir
from edgeinfer.server import offline
from edgeinfer.server.core.problems import Problem
from edgeinfer.server.core.wire import Reply

#: Of one key: the sizes of all files together (bytes), and how long each is kept (seconds).
MOST_BYTES = 1 << 30
KEPT_S = 30 * 86_400
#: Requests of a batch at once: others find room beside them.
_AT_ONCE = 4
_MOST_RUNNING = 16
_ID = re.compile(r"(?:file-|batch_)[0-9a-f]{24}")

R = TypeVar("R", bound=Reply)
Ask = Callable[[offline.BatchLine], Awaitable[offline.Reply]]


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

    def begin(self, ask: Ask, folder: Path, batch: BatchObject, lines: list[offline.BatchLine]) -> None:
        """Answer the lines in the background. Raises Problem 429 beside too many other batches."""
        if len(self._running) >= _MOST_RUNNING:
            said = f"{_MOST_RUNNING} batches run already."
            raise Problem(
                429, said, kind="rate_limit_error", code="rate_limit_exceeded", retry_after_s=60
            )
        write(folder, batch)
        task = asyncio.create_task(self._run(ask, folder, batch.id, lines))
        self._running[batch.id] = (task, batch)

    async def _run(self, ask: Ask, folder: Path, name: str, lines: list[offline.BatchLine]) -> None:
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
            write(folder, msgspec.structs.replace(batch, **ended))
            size = (folder / f"{output}.jsonl").stat().st_size
            write(folder, new_file(output, size, f"{name}_output.jsonl", "batch_output"))

    async def _answer(self, ask: Ask, name: str, todo: Iterator[offline.BatchLine], file: Any) -> None:
        for line in todo:
            reply = await ask(line)
            file.write(offline.answer_line(line, reply))
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
        batch = read(folder, name, BatchObject)
        if name in self._running:
            return self._running[name][1]
        if batch.status == "in_progress":
            batch = msgspec.structs.replace(batch, status="failed", failed_at=batch.in_progress_at)
        return batch

    async def cancel(self, name: str) -> None:
        """End a batch, if it runs."""
        if name in self._running:
            task, _ = self._running[name]
            task.cancel()
            await asyncio.wait([task])


def new_file(name: str, size: int, filename: str, purpose: Purpose) -> FileObject:
    """Describe a file that begins now."""
    now = int(time.time())
    return FileObject(
        id=name, bytes=size, created_at=now, expires_at=now + KEPT_S, filename=filename, purpose=purpose
    )


def write(folder: Path, record: FileObject | BatchObject) -> None:
    """Keep a record under its id."""
    made = folder / f"{record.id}.{secrets.token_hex(4)}"
    made.write_bytes(msgspec.json.encode(record))
    made.replace(folder / f"{record.id}.json")


def read(folder: Path, name: str, kind: type[R]) -> R:
    """Raises Problem 404."""
    try:
        if _ID.fullmatch(name):
            return msgspec.json.decode((folder / f"{name}.json").read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        pass
    raise Problem(404, f"There is no '{name[:64]}' here.", param="id", code="not_found")
