"""A warming that the launcher runs for a chat: its stages as lines, its end as an envelope, and
stopping it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from edgeinfer.errors import DumpError, InterruptedByUser
from edgeinfer.host import LoadProgress
from edgeinfer.runtime.options import LoadOptions


class _Failed(msgspec.Struct, frozen=True):
    message: str = ""
    hint: str = ""


class _Envelope(msgspec.Struct, frozen=True):
    ok: bool
    error: _Failed = _Failed()


def warm_argv(model: str, options: LoadOptions) -> list[str]:
    """The arguments after `edgeinfer warm`."""
    return [
        model,
        "--json",
        "--ctx",
        str(options.n_ctx),
        "--repack",
        options.repack,
        "--kv-type",
        options.kv_type,
    ]


def listen(
    model: str,
    fd: int,
    progress: LoadProgress | None,
    cancel: threading.Event | None,
    stop: Callable[[], None],
) -> None:
    """Hear it to its end on `fd`, which is closed then. Raises DumpError with its words,
    InterruptedByUser once stopped.
    """
    ended = threading.Event()
    if cancel is not None:
        threading.Thread(target=_stop_when, args=(cancel, ended, stop), daemon=True).start()
    said, last = _Envelope(ok=False), ""
    with open(fd, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("{"):
                said = _decoded(line, said)
            elif line.strip():
                last = line.strip().removesuffix("…").strip()
                if progress is not None:
                    progress(last, None)
    ended.set()
    if cancel is not None and cancel.is_set():
        raise InterruptedByUser("stopped; nothing of the snapshot is kept")
    if not said.ok:
        words = said.error.message or last or "it ended without a word"
        raise DumpError(
            f"{model} was not warmed: {words}", hint=said.error.hint or f"run `edgeinfer warm {model}`"
        )


def _decoded(line: str, before: _Envelope) -> _Envelope:
    try:
        return msgspec.json.decode(line, type=_Envelope)
    except msgspec.MsgspecError:
        return before


def _stop_when(cancel: threading.Event, ended: threading.Event, stop: Callable[[], None]) -> None:
    while not ended.wait(0.05):
        if cancel.is_set():
            stop()
            return
