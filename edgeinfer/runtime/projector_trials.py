"""Try a projector once in a process of its own, before the engine opens it."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence

import msgspec

import edgeinfer
from edgeinfer.platform.cache_files import CacheTable
from edgeinfer.platform.disk import stamps
from edgeinfer.platform.process import child_command

_HELPER = "edgeinfer.runtime.llama.helpers.projector_trial"
#: The largest encoders take 40 s for a picture on two cores.
_PATIENCE_S = 600.0

#: The projectors that worked, by the stamps of their files and the model's.
_KNOWN = CacheTable("projectors.json", dict[str, bool])


def failure(projector: str, model: Sequence[str]) -> str:
    """Return why the projector cannot be opened with the model's files; "" if it can."""
    key = f"{edgeinfer.__version__} {stamps((projector, *model))}"
    if key in _KNOWN.read():
        return ""
    reason = _tried([projector, *model])
    if not reason:
        _KNOWN.put(key, True)
    return reason


def _tried(files: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            child_command(_HELPER, *files), capture_output=True, timeout=_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"a first picture takes more than {_PATIENCE_S:.0f} s"
    try:
        return msgspec.json.decode(done.stdout, type=str)
    except msgspec.MsgspecError:
        code = done.returncode
        ended = signal.Signals(-code).name if code < 0 else f"status {code}"
        return f"its first picture ended the process ({ended})"
