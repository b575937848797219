"""Log to stderr, one line per event, without prompts, answers and API keys.

A line is a JSON object (style `json`) or plain text for a terminal (`text`). uvicorn's warnings are
logged in the same style. No file is opened, because an open file would prevent a snapshot of the
process.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import sys
import time
import traceback
from typing import Any, Literal, TextIO

import msgspec

#: Errors of accept(2) when file descriptors or memory run out. asyncio would log 2,000 a second.
_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
#: Minimum time (s) between two warnings that no connection can be accepted.
_WARN_AGAIN_S = 60.0

Style = Literal["json", "text", "off"]


class Log:
    """Writes log lines: the name of an event, and its `fields`, whose values JSON can express."""

    def __init__(self, style: Style, stream: TextIO | None = None) -> None:
        self._style = style
        self._stream = stream

    def info(self, event: str, **fields: Any) -> None:
        self.write("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self.write("warning", event, fields)

    def error(self, event: str, error: BaseException | None = None, **fields: Any) -> None:
        if error is not None:
            fields["error"] = f"{type(error).__name__}: {error}"
            fields["traceback"] = "".join(traceback.format_exception(error))
        self.write("error", event, fields)

    def write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        if self._style == "off":
            return
        stream = self._stream or sys.stderr
        now = time.time()
        if self._style == "json":
            record = {"ts": round(now, 3), "level": level, "event": event, **fields}
            line = msgspec.json.encode(record).decode()
        else:
            trace = fields.pop("traceback", "")
            pairs = [f"{key}={value}" for key, value in fields.items() if value not in ("", None)]
            text = " ".join(pairs)
            clock = time.strftime("%H:%M:%S", time.localtime(now))
            line = f"{clock} {event} {text}".rstrip() + (f"\n{trace.rstrip()}" if trace else "")
        try:
            stream.write(line + "\n")
            stream.flush()
        except (OSError, ValueError):  # stderr is closed: keep serving without a log
            self._style = "off"


class UvicornHandler(logging.Handler):
    """Sends warnings and errors of the logging module to a `Log`, as the event `http-server`."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {"message": record.getMessage()}
        if record.exc_info and record.exc_info[1] is not None:
            fields["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        self._log.write(record.levelname.lower(), "http-server", fields)


def capture(log: Log) -> None:
    """Send uvicorn's and asyncio's messages to `log`. Call it on the event loop, before serving.

    The warning that no connection can be accepted is logged at most once a minute.
    """
    warned_s = -_WARN_AGAIN_S
    for name in ("uvicorn", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers = [UvicornHandler(log)]
        logger.setLevel(logging.WARNING)
        logger.propagate = False
    logging.getLogger("uvicorn.access").disabled = True

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal warned_s
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _EXHAUSTED:
            loop.default_exception_handler(context)
        elif time.monotonic() - warned_s >= _WARN_AGAIN_S:
            warned_s = time.monotonic()
            log.warning("connections-wait", reason=error.strerror)

    asyncio.get_running_loop().set_exception_handler(handle)
