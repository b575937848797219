"""`edgeinfer warm` in a process of its own, for a chat that goes on meanwhile: its stages, its end, and stopping it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading

import msgspec

from edgeinfer.errors import DumpError, InterruptedByUser
from edgeinfer.host import LoadProgress
from edgeinfer.process import child_command
from edgeinfer.runtime.options import LoadOptions


class _Failed(msgspec.Struct, frozen=True):
    message: str = ""
    hint: str = ""


class _Envelope(msgspec.Struct, frozen=True):
    ok: bool
    error: _Failed = _Failed()


def warm_apart(model: str, options: LoadOptions, progress: LoadProgress | None, cancel: threading.Event | None) -> None:
    """Wait for it. Raises DumpError with its words, InterruptedByUser when `cancel` is set."""
    words = ["warm", model, "--json", "--ctx", str(options.n_ctx), "--repack", options.repack, "--kv-type", options.kv_type]
    process = subprocess.Popen(
        child_command("edgeinfer", *words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    ended = threading.Event()
    if cancel is not None:
        threading.Thread(target=_stop_when, args=(process, cancel, ended), daemon=True).start()
    assert process.stderr is not None
    assert process.stdout is not None
    talk = []
    for line in process.stderr:
        talk.append(line.strip())
        if progress is not None and line.strip():
            progress(line.strip().removesuffix("…").strip(), None)
    said = process.stdout.read()
    process.wait()
    ended.set()
    if cancel is not None and cancel.is_set():
        raise InterruptedByUser("stopped; nothing of the snapshot is kept")
    if process.returncode:
        raise _error(model, said, talk)


def _stop_when(process: subprocess.Popen[str], cancel: threading.Event, ended: threading.Event) -> None:
    while not ended.wait(0.05):
        if cancel.is_set():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            return


def _error(model: str, said: str, talk: list[str]) -> DumpError:
    try:
        failed = msgspec.json.decode(said, type=_Envelope).error
    except msgspec.MsgspecError:
        failed = _Failed(message=talk[-1] if talk else "it ended without a word")
    return DumpError(f"{model} was not warmed: {failed.message}", hint=failed.hint or f"run `edgeinfer warm {model}`")
