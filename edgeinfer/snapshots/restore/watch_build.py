"""A build that the launcher runs for a chat: ordering, following and stopping it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from edgeinfer.errors import DumpError, InterruptedByUser, from_fields, to_fields
from edgeinfer.host import LoadProgress
from edgeinfer.runtime.options import LoadOptions


class _Envelope(msgspec.Struct, frozen=True):
    """What `edgeinfer warm --json` prints at its end; `error` as in `errors.to_fields`."""

    ok: bool
    error: dict[str, str] = {}


def warm_argv(model: str, options: LoadOptions) -> list[str]:
    """The arguments after `edgeinfer warm`."""
    return [model, "--json", "--load-options", msgspec.json.encode(options).decode()]


def listen(
    model: str,
    fd: int,
    progress: LoadProgress | None,
    cancel: threading.Event | None,
    stop: Callable[[], None],
) -> None:
    """Read a build's progress from `fd` until it ends, then close `fd`.

    Raises the error it ended with, DumpError when it ended without one, InterruptedByUser once stopped.
    """
    ended = threading.Event()
    if cancel is not None:
        threading.Thread(target=_stop_when, args=(cancel, ended, stop), daemon=True).start()
    said = _Envelope(ok=False)
    last = ""
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
        why = said.error.get("message") or last or "it ended without a word"
        error = said.error or to_fields(DumpError("", hint=f"run `edgeinfer warm {model}`"))
        raise from_fields({**error, "message": f"{model} was not warmed: {why}"})


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
