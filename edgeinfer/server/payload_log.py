"""The payload log: a CloudEvent for each generation request with its answer, one JSON line each.

The log is off without `--log-payloads FOLDER`. A thread encodes and writes the lines. The file is
opened for each line, because CRIU restores an open file only if its size is the same as at the dump.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import queue
import re
import secrets
import socket
import stat
import threading
import time
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from edgeinfer.errors import InvalidRequestError, ServeError
from edgeinfer.media.pictures import decode_file
from edgeinfer.platform import disk, paths
from edgeinfer.receipts.receipt import MAX_BYTES as MAX_LINE_BYTES  # what `edgeinfer verify` reads

if TYPE_CHECKING:
    from edgeinfer.receipts.receipt import Receipt, Refusal
    from edgeinfer.runtime.event_stream import CollectedAnswer
    from edgeinfer.server.context import RequestContext
    from edgeinfer.server.endpoint import Endpoint

#: A new file begins at this size (bytes), and each day (UTC).
_MAX_BYTES = 64 << 20
#: Age (s) at which a file is removed.
_KEPT_S = 30 * 86_400
#: Matches the name of a log file, e.g. `payloads-20261130-120000-1.jsonl`. Only these files are
#: removed: the folder may have the user's own files, too.
_NAME = re.compile(r"payloads-\d{8}-\d{6}-\d+\.jsonl")
#: Maximum bytes that wait to be written; further lines are dropped. A line counts as its request's body
#: plus `_LINE_BYTES`.
_MAX_WAITING_BYTES, _LINE_BYTES = 64 << 20, 64 << 10
#: Interval (s) after which a failure with the same reason is logged again.
_WARN_AGAIN_S = 60.0
#: Interval (s) between two fsyncs, and how long (s) `close` waits for the last lines.
_SYNC_S, _CLOSE_S = 1.0, 2.0
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
#: Matches a string that is a whole data URL, e.g. `data:image/png;base64,…`. Its content is not logged.
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)(;[\w.+-]+=[^;,]*)*;base64,[^ ]+", re.IGNORECASE)
#: Maximum nesting of objects and lists in a logged request, so that Python's JSON parser can read the
#: log.
_MAX_DEPTH = 900
#: Key of a JSON object whose value is plain base64 (not a `data:` URL) → kind of its content, which is
#: not logged.
_MEDIA_KEYS = {"images": "image", "multimodal_data": "image", "file_data": "file"}
_Answers = list[tuple["CollectedAnswer", "Receipt | Refusal | None"]]
#: A log line before it is encoded: the event without request and answers, the request's body, and the
#: answers.
_Pending = tuple[dict[str, Any], bytes, _Answers]


class PayloadLog:
    """Writes the payload log of an endpoint: each request that generates text, with its answers.

    If writing fails, lines are lost but requests succeed.
    """

    def __init__(self, folder: Path, endpoint: Endpoint) -> None:
        """Create the folder and remove old files. Raises what `make_folder` raises."""
        self._folder = make_folder(folder)
        self._log, self._metrics = endpoint.log, endpoint.metrics
        #: Shown by GET /status. `failure` says why the last line was dropped, "" if it was written.
        self.status: dict[str, Any] = dict.fromkeys(("written", "dropped", "opted_out"), 0)
        self.status |= {"folder": str(self._folder), "failure": ""}
        self._queue: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._thread: threading.Thread | None = None
        self._path = Path()
        self._unsynced: set[Path] = set()
        self._sync_s = 0.0
        #: Reason of a failure → when it was last logged (time.monotonic(), s).
        self._warned_s: dict[str, float] = {}
        self._log.warning("payload-log", folder=str(self._folder), writes="every request and answer")
        self.remove_old()

    def write(self, context: RequestContext, method: str) -> None:
        """Queue an ended request with its answers, if its route generates text.

        A request is left out if its client opted out by the header `x-edgeinfer-no-log`, and dropped if
        too many lines wait to be written.
        """
        if not (context.operation and context.operation.generates):
            return
        if context.headers.get("x-edgeinfer-no-log", "").strip().lower() in ("1", "true"):
            self._metrics.payloads_opted_out.inc()
            self._count("opted_out", 0)
            return
        body = context.body or b""
        n_bytes = len(body) + _LINE_BYTES
        with self._lock:
            self._waiting_bytes += n_bytes
        if self._waiting_bytes > _MAX_WAITING_BYTES:
            self._drop("too many lines wait for the disk", n_bytes)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="payload-log", daemon=True)
            self._thread.start()
        answers = list(zip_longest(context.answers, context.receipts))  # a failed request has no answer
        self._queue.put((_event(context, method), body, answers))

    def close(self) -> None:
        """Wait up to `_CLOSE_S` until the queued lines are written."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (pending := self._next()) is not None:
            n_bytes = len(pending[1]) + _LINE_BYTES
            try:
                self._append(_line(*pending))
                self._count("written", n_bytes)
            except Exception as error:  # noqa: BLE001  a line that fails must not end this thread
                self._drop(getattr(error, "strerror", None) or repr(error), n_bytes)
        self._sync()

    def _next(self) -> _Pending | None:
        """Return the next pending line, None to end. While waiting, sync files every `_SYNC_S`."""
        left_s = self._sync_s - time.monotonic()
        with contextlib.suppress(queue.Empty):
            if self._unsynced and left_s > 0:
                return self._queue.get(timeout=left_s)
        self._sync()
        return self._queue.get()

    def _sync(self) -> None:
        for path in self._unsynced:
            with contextlib.suppress(OSError):  # the file was moved, or the next write will fail, too
                disk.sync(path)
        self._unsynced.clear()
        self._sync_s = time.monotonic() + _SYNC_S

    def _count(self, outcome: str, n_bytes: int, failure: str = "") -> None:
        with self._lock:
            self._waiting_bytes -= n_bytes
            self.status |= {outcome: self.status[outcome] + 1, "failure": failure}

    def _drop(self, reason: str, n_bytes: int) -> None:
        """Count a lost line; log `reason` unless the log has had it for less than a minute."""
        self._metrics.payloads_dropped.inc()
        now_s = time.monotonic()
        with self._lock:
            recent = {logged: s for logged, s in self._warned_s.items() if now_s - s < _WARN_AGAIN_S}
            self._warned_s = {reason: now_s} | recent
        if reason not in recent:
            self._log.warning("payload-log-fails", folder=str(self._folder), reason=reason)
        self._count("dropped", n_bytes, reason)

    def _append(self, line: bytes) -> None:
        """Append a line with one write(); remove it if only a part was written. Raises OSError."""
        with open(self._open(len(line)), "ab", buffering=0) as file:
            size, path = os.fstat(file.fileno()).st_size, self._path
            self._unsynced.add(path)
            if file.write(line) < len(line):
                self._path = Path()  # if truncate() fails, the next line is written to a new file
                file.truncate(size)
                self._path = path
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _open(self, n_bytes: int) -> int:
        """Return a descriptor of a log file, locked and with space for `n_bytes`.

        A new file begins if the current file is full, of another day, deleted, or locked by a process.
        """
        _check_folder(self._folder)  # another user may have replaced it
        if self._path.name.startswith(f"payloads-{datetime.now(UTC):%Y%m%d}"):
            with contextlib.suppress(FileNotFoundError):
                descriptor = disk.open_regular(self._path, _FLAGS)
                size = os.fstat(descriptor).st_size
                if (not size or size + n_bytes <= _MAX_BYTES) and disk.try_lock(descriptor):
                    return descriptor
                os.close(descriptor)
        self.remove_old()
        while True:
            name = f"payloads-{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}.jsonl"
            with contextlib.suppress(FileExistsError):
                descriptor = disk.open_regular(self._folder / name, _FLAGS | os.O_CREAT | os.O_EXCL)
                disk.try_lock(descriptor)
                self._path = self._folder / name
                return descriptor
            time.sleep(0.05)  # a file of this second exists: wait for another name

    def remove_old(self) -> None:
        """Remove log files that were last written more than 30 days before the newest log file.

        Ages are counted from the newest file's time, not from the clock, so that no file is removed at
        a start with a clock that is ahead. But a line that is written with such a clock makes earlier
        files old. After a pause of more than 30 days, old files are removed when a second new file
        begins, or at a later start.
        """
        with contextlib.suppress(OSError):
            files = [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
            written_s = {path: path.lstat().st_mtime for path in files}
            newest_s = min(time.time(), max(written_s.values(), default=0))
            for path in files:
                if written_s[path] < newest_s - _KEPT_S:
                    path.unlink()


def make_folder(folder: Path) -> Path:
    """Create the folder (mode 0700). Raises ServeError if other users own it or may write to it."""
    folder = folder.expanduser().resolve()
    try:
        paths.make_folder(folder)
        _check_folder(folder)
    except FileExistsError as error:
        message = f"payloads cannot be logged: {folder} is a file, not a folder"
        raise ServeError(message, hint="name a folder: --log-payloads FOLDER") from error
    except OSError as error:
        message = f"payloads cannot be logged to {folder}: {error.strerror}"
        hint = f"name a folder of your own, or `chmod 700 {folder}`"
        raise ServeError(message, hint=hint) from error
    return folder


def _check_folder(folder: Path) -> None:
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "it belongs to another user, or others may write to it")


def _event(context: RequestContext, method: str) -> dict[str, Any]:
    problem, version = context.problem, context.version
    return {
        "specversion": "1.0",
        "id": secrets.token_hex(16),  # not the request's id, which a client may send twice
        "source": f"//{socket.gethostname()}/edgeinfer",
        "type": "io.edgeinfer.generation",
        "time": datetime.fromtimestamp(time.time() - context.seconds, UTC).isoformat(),
        "subject": f"{context.model}@sha256:{version}" if version else context.model,
        "datacontenttype": "application/json",
        "data": {
            "request_id": context.id,
            "operation": f"{method} {context.route}",
            "key": context.key,
            "status": context.status,
            "outcome": "disconnected" if context.client_left else context.outcome,
            "ms": round(context.seconds * 1000, 1),
            "error": problem and {"code": problem.code, "message": problem.message},
        },
    }


def _line(event: dict[str, Any], body: bytes, answers: _Answers) -> bytes:
    """Return the line of a request. If `edgeinfer verify` could not read it, the request is omitted."""
    event["data"] |= {"request": None, "answers": [_describe(*pair) for pair in answers]}
    try:
        event["data"]["request"] = _without_media(msgspec.json.decode(body or b"null"))
        line = msgspec.json.encode(event)
        reason = "a long request" if len(line) > MAX_LINE_BYTES else ""
    except (msgspec.DecodeError, UnicodeDecodeError):
        reason = "not JSON"
    except RecursionError:
        reason = "deep nesting"
    if reason:
        event["data"]["request"] = _omit(reason, body)
        line = msgspec.json.encode(event)
    return line + b"\n"


def _describe(answer: CollectedAnswer, receipt: Receipt | Refusal | None) -> dict[str, Any]:
    calls = [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in answer.calls.values()]
    fields: dict[str, Any] = {"text": answer.text, "reasoning": answer.reasoning, "tool_calls": calls}
    if (finish := answer.last_event) is not None:
        fields |= {"finish_reason": finish.reason, "usage": finish.usage, "timings": finish.timings}
    return fields | {"receipt": receipt}


def _without_media(document: Any) -> Any:
    """Replace base64 of pictures, audio and files by its size and SHA-256.

    Raises RecursionError if objects and lists are nested deeper than `_MAX_DEPTH`.
    """
    root = [document]
    pending: list[tuple[Any, str, int]] = [(root, "", 0)]
    while pending:
        parent, kind_of_elements, depth = pending.pop()
        if depth > _MAX_DEPTH:
            raise RecursionError
        is_object = isinstance(parent, dict)
        kinds: dict[Any, str] = _media_kinds(parent) if is_object else {}
        for key, value in parent.items() if is_object else enumerate(parent):
            kind = kinds.get(key, "") if is_object else kind_of_elements
            if isinstance(value, str):
                parent[key] = _without_base64(value, kind)
            elif isinstance(value, dict | list):
                pending.append((value, kind, depth + 1))
    return root[0]


def _media_kinds(fields: dict[str, Any]) -> dict[str, str]:
    """Return the keys that hold plain base64 in an object, with the type of each ("audio/wav")."""
    kind, format = fields.get("media_type"), fields.get("format")
    if fields.get("type") == "base64":  # the `source` of a picture in Anthropic's API
        return _MEDIA_KEYS | {"data": kind if isinstance(kind, str) else "file"}
    # an object with `format` is the `input_audio` of OpenAI's API
    return _MEDIA_KEYS | {"data": f"audio/{format}"} if isinstance(format, str) else _MEDIA_KEYS


def _without_base64(text: str, kind: str) -> str | dict[str, Any]:
    """Replace a data URL, or plain base64 if `kind` is its type (e.g. "image"), by size and SHA-256."""
    if match := _DATA_URL.fullmatch(text):
        kind = match[1]
    elif not kind or text.startswith("http"):
        return text
    with contextlib.suppress(InvalidRequestError):
        return _omit(kind, decode_file(text, InvalidRequestError))
    return text if match else _omit(kind, text.encode())


def _omit(kind: str, content: bytes) -> dict[str, Any]:
    return {"omitted": kind, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
