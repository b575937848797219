"""What trials of copies have found, kept for later processes for a week."""

from __future__ import annotations

import hashlib
import time

from edgeinfer.runtime.options import EngineInfo
from edgeinfer.system.cache_files import CacheTable
from edgeinfer.workers.copies.growth import Verdict

_KEPT_S = 7 * 24 * 3600.0
_TRIALS = CacheTable("copies-trials.json", dict[str, tuple[Verdict, ...]])


def key(info: EngineInfo, cores: int) -> str:
    """The name under which trials of this model, with these options and cores, are remembered."""
    seen = [info.model, info.sha256, str(info.n_ctx), str(info.n_parallel), str(cores)]
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()[:32]


def verdicts(name: str) -> dict[int, Verdict]:
    """What is known of one model, by how many copies there were."""
    return {found.copies: found for found in everything().get(name, ())}


def everything() -> dict[str, tuple[Verdict, ...]]:
    """Every trial of the last week."""
    oldest = time.time() - _KEPT_S
    recent = {name: tuple(v for v in found if v.at > oldest) for name, found in _TRIALS.read().items()}
    return {name: found for name, found in recent.items() if found}


def remember(name: str, verdict: Verdict) -> None:
    """Keep a trial for later processes."""
    others = (found for found in everything().get(name, ()) if found.copies != verdict.copies)
    _TRIALS.put(name, (*others, verdict))
