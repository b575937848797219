"""Get a resumed process's canary, or facts that show whether the resume is complete."""

from __future__ import annotations

import os
import random
import resource
import secrets
import signal
import ssl
import sys
import tempfile
import time
import uuid

import msgspec

from edgeinfer.errors import RestoreError
from edgeinfer.launcher import messages, supervise
from edgeinfer.launcher.messages import LaunchRequest
from edgeinfer.platform.linux import getrandom
from edgeinfer.runtime.events import TextDelta
from edgeinfer.runtime.requests import GenerateRequest, Sampling
from edgeinfer.snapshot_format import criu
from edgeinfer.snapshot_format.storage import Manifest
from edgeinfer.snapshots.restore.loaded_model import LoadedModel

_SAMPLED_TOKENS = 12


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a resumed process. `random` maps each source of randomness to a value from it.

    `modules` are the names of the imported modules. All other fields show what the process adopted
    from its launch request.
    """

    random: dict[str, str]
    environment: dict[str, str]
    cwd: str
    umask: int
    timezone: str
    affinity: list[int]
    nofile: int
    nice: int
    modules: list[str]


def gather(loaded: LoadedModel | None) -> Facts:
    drawn = {
        "os.urandom": os.urandom(16).hex(),
        "getrandom": getrandom(16).hex(),
        "secrets": secrets.token_hex(16),
        "uuid4": str(uuid.uuid4()),
        "uuid1": str(uuid.uuid1()),
        "random": repr(random.random()),
        "ssl": ssl.RAND_bytes(16).hex(),
        "tempfile": next(tempfile._get_candidate_names()),  # type: ignore[attr-defined]
    }
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        drawn["numpy"] = repr(numpy.random())
    if loaded is not None and loaded.engine.info.can_generate:
        drawn["sampler"] = _sample(loaded)
    umask = os.umask(0o077)
    os.umask(umask)
    return Facts(
        random=drawn,
        environment=dict(os.environ),
        cwd=os.getcwd(),
        umask=umask,
        timezone=time.strftime("%Z"),
        affinity=sorted(os.sched_getaffinity(0)),
        nofile=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        nice=os.getpriority(os.PRIO_PROCESS, 0),
        modules=sorted(sys.modules),
    )


def _sample(loaded: LoadedModel) -> str:
    request = GenerateRequest(
        prompt="Once",
        max_tokens=_SAMPLED_TOKENS,
        ignore_eos=True,
        sampling=Sampling(temperature=5.0, top_k=0, top_p=1.0, min_p=0.0),
    )
    events = loaded.engine.submit(request)
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def ask_resumed_process(
    manifest: Manifest, folder: str, role: str, limit_s: int = criu.RESTORE_LIMIT_S
) -> bytes:
    """Resume the snapshot in `folder`; return what the process computes in this `role`.

    For "canary", that is the result of `LoadedModel.canary`, for "facts" a `Facts` as JSON. Raises
    RestoreError if the snapshot cannot be resumed in `limit_s` seconds.
    """
    now = time.monotonic_ns()
    request = LaunchRequest(role=role, entropy=os.urandom(64), how="resumed")
    request.exec_ns = request.main_ns = request.spawn_ns = now
    supervisor = supervise.resume(manifest, folder, limit_s)
    try:
        messages.send(supervisor.link, request)
        answer = messages.receive(supervisor.link)
    finally:
        supervisor.link.close()
    payload = answer[0] if answer else None
    if not isinstance(payload, messages.Payload):
        os.kill(supervisor.pid, signal.SIGKILL)
    with open(supervisor.status_fd, "rb") as status:
        reason = status.read().decode(errors="replace").strip()
    os.waitpid(supervisor.pid, 0)
    if not isinstance(payload, messages.Payload):
        raise RestoreError(f"the snapshot cannot be resumed: {reason or 'no reason given'}")
    return payload.content
