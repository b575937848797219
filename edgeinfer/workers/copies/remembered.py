"""What trials of copies have found, kept for later processes for a week."""

from __future__ import annotations

import contextlib
import hashlib
import time
from pathlib import Path

import msgspec

from edgeinfer import paths
from edgeinfer.disk import write_whole
from edgeinfer.errors import DiskFullError
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.workers.copies.growth import Verdict

_KEPT_S = 7 * 24 * 3600.0


def key(info: EngineInfo, cores: int) -> str:
    """The name under which trials of this model, with these options and cores, are remembered."""
    seen = [info.model, info.sha256, str(info.n_ctx), str(info.n_parallel), str(cores)]
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()[:32]


def verdicts(name: str) -> dict[int, Verdict]:
    """What is known of one model, by how many copies there were."""
    return {found.copies: found for found in everything().get(name, ())}


def everything() -> dict[str, tuple[Verdict, ...]]:
    """Every trial of the last week; none where they cannot be read."""
    oldest = time.time() - _KEPT_S
    try:
        raw = _file().read_bytes()
        known = msgspec.json.decode(raw, type=dict[str, tuple[Verdict, ...]])
    except (OSError, msgspec.MsgspecError):
        return {}
    recent = {name: tuple(v for v in found if v.at > oldest) for name, found in known.items()}
    return {name: found for name, found in recent.items() if found}


def remember(name: str, verdict: Verdict) -> None:
    """Keep a trial for later processes; where that fails, it is made again."""
    known = everything()
    others = (found for found in known.get(name, ()) if found.copies != verdict.copies)
    known[name] = (*others, verdict)
    with contextlib.suppress(OSError, DiskFullError):
        paths.cache_dir().mkdir(parents=True, exist_ok=True)
        write_whole(_file(), msgspec.json.encode(known))


def _file() -> Path:
    return paths.cache_dir() / "copies-trials.json"
