"""Ask for the devices of this machine without opening one in this process."""

from __future__ import annotations

import signal
import subprocess

import msgspec

from edgeinfer.platform.process import child_command
from edgeinfer.runtime.backends import files
from edgeinfer.runtime.backends.devices import Loaded, NotLoaded

_HELPER = "edgeinfer.runtime.helpers.devices"
#: A driver that takes longer is stuck.
_PATIENCE_S = 30.0


def survey() -> tuple[Loaded | NotLoaded, ...]:
    """What each backend library that is here gives, by a process for each: 0.2 s and more."""
    return tuple(ask(file.name) for file in files.available())


def ask(name: str) -> Loaded | NotLoaded:
    """What one backend library gives, or how the process ended that loaded it."""
    command = child_command(_HELPER, name)
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return NotLoaded(name=name, reason=f"its driver did not answer within {_PATIENCE_S:.0f} s")
    try:
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=Loaded | NotLoaded)
    except (IndexError, msgspec.MsgspecError):
        return NotLoaded(name=name, reason=f"the process that loaded it {_ended(done)}")


def _ended(done: subprocess.CompletedProcess[bytes]) -> str:
    if done.returncode < 0:
        return f"died of {signal.Signals(-done.returncode).name}"
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return f"ended with {done.returncode}: {said[-1] if said else 'without a word'}"
