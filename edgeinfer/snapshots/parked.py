"""The process that a snapshot captures: it loads a model, waits for the dump, and is resumed.

`python -m edgeinfer.snapshots.parked` has the builder's socket as descriptor LINK_FD and a pipe as
WAKE_FD. During the dump the standard streams are /dev/null, and LINK_FD is an unconnected socket. A
restore replaces that socket by the link to the launcher, and the pipe by one with a byte in it. The
builder sets the environment variables, so a snapshot never contains the user's variables or keys.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pkgutil
import select
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edgeinfer.cli.parser import build_parser
from edgeinfer.config.config_file import load_config
from edgeinfer.errors import DumpError, EdgeInferError, to_fields
from edgeinfer.launcher import messages
from edgeinfer.launcher.argv import LAUNCH_VERBS
from edgeinfer.platform import process
from edgeinfer.runtime.llama.mappings import areas, mapped_weights
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.snapshot_format.storage import LINK_FD, WAKE_FD
from edgeinfer.snapshots.inputs import SnapshotInputs, actual_options, describe, unmapped_files
from edgeinfer.snapshots.restore import app_process
from edgeinfer.snapshots.restore.loaded_model import LoadedModel, chosen_values

if TYPE_CHECKING:
    from edgeinfer.runtime.engine import LlamaEngine

#: Packages of edgeinfer of which every module is imported before the dump.
OWN_PACKAGES = "cli chat runtime server snapshots tui workers".split()
#: Other modules that a launch would import. tests/snapshots/test_resume.py fails if one is missing.
LAZY_MODULES = """
    asyncio.selector_events asyncio.unix_events bz2 concurrent.futures.thread decimal encodings.ascii
    encodings.idna encodings.latin_1 encodings.utf_8_sig glob http.client json lzma
    multiprocessing.connection readline sqlite3 tomllib unicodedata uuid zoneinfo
    edgeinfer.models.catalog edgeinfer.models.reference edgeinfer.cli.main httptools llguidance
    textual.app textual.drivers.linux_driver textual.widgets uvicorn uvicorn.lifespan.off
    uvicorn.lifespan.on uvicorn.logging uvicorn.loops.asyncio uvicorn.loops.auto
    uvicorn.protocols.http.auto uvicorn.protocols.http.h11_impl
    uvicorn.protocols.http.httptools_impl uvicorn.protocols.utils
""".split()


class ParkedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """The report of the parked process to the builder.

    `actual` has the option values that the load chose, `canary` the result of `LoadedModel.canary`.
    `files` are the paths of all files that the process has mapped or read, `system_tokens` the number
    of prefilled tokens. CRIU needs `pid` (in the process's pid namespace) and the inodes of the socket
    LINK_FD and the pipe WAKE_FD.
    """

    info: EngineInfo
    actual: dict[str, str]
    canary: bytes
    files: tuple[str, ...]
    system_tokens: int
    stages_ms: dict[str, float]
    pid: int = 0
    link_inode: int = 0
    wake_inode: int = 0


def import_everything() -> None:
    """Import all installed modules that chat, run and serve need."""
    names = [*LAZY_MODULES]
    for package in (f"edgeinfer.{name}" for name in OWN_PACKAGES):
        modules = pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
        names += [module.name for module in modules if not module.name.endswith("__main__")]
    for name in names:
        with contextlib.suppress(ImportError):  # an optional dependency is not installed
            importlib.import_module(name)
    widgets = sys.modules.get("textual.widgets")
    for name in getattr(widgets, "__all__", ()):
        with contextlib.suppress(ImportError):
            getattr(widgets, name)


class Stages:
    """Reports a build's stages over the socket `link`. `ms` has the duration of each ended stage."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._name, self._since = "", time.monotonic()
        self.ms: dict[str, float] = {}

    def begin(self, name: str) -> None:
        """End the current stage and begin the stage `name`; with "", begin none."""
        now = time.monotonic()
        if self._name:
            self.ms[self._name] = round((now - self._since) * 1000, 1)
        self._name, self._since = name, now
        if name:
            self.report(None)

    def report(self, fraction: float | None) -> None:
        """Report which fraction (0 to 1) of the stage is done, None if that is unknown."""
        done = "" if fraction is None else f"{fraction:.4f}"
        messages.send(self._link, messages.Stage(name=self._name, fraction=done))


def load_and_park(link: socket.socket, inputs: SnapshotInputs) -> tuple[LoadedModel, ParkedProcess]:
    """Load the model, import modules, prefill the system prompt, and stop the engine's threads.

    Returns the model, and the report to the builder. Raises the errors of `load_engine`.
    """
    from edgeinfer.runtime.engine import load_engine  # slow import: 160 to 290 ms

    files, options = inputs.files, inputs.options
    # a launch without its own system prompt uses the catalogue's, which is prefilled here
    loadable = msgspec.structs.replace(files, system_prompt=inputs.system)
    stages = Stages(link)
    stages.begin("load")
    # load and import at the same time: llama.cpp does not hold the GIL
    with ThreadPoolExecutor(1) as loader:
        loading = loader.submit(
            load_engine, loadable, options, lambda _stage, fraction: stages.report(fraction)
        )
        import_everything()
        _rehearse()
        engine: LlamaEngine = loading.result()
    if inputs.actual is not None and actual_options(options, engine) != inputs.actual:
        engine.close()  # with other free memory than before, this load chose other values
        engine = load_engine(loadable, inputs.actual)
    if inputs.adapters is not None and inputs.adapters != engine.info.lora:
        engine.use_adapters(inputs.adapters)
    loaded = LoadedModel(engine, describe(engine, inputs))
    system_tokens = 0
    if engine.info.has_chat_template:
        stages.begin("prefill")
        system_tokens = engine.prefill_system(inputs.system)
    stages.begin("warm up")
    engine.warm_up()
    # computing the canary also reads every weight once, in a prefill and in decode steps
    canary = loaded.canary()
    engine.park()
    loaded.weights = mapped_weights()
    stages.begin("")
    parked = ParkedProcess(
        info=engine.info,
        actual=chosen_values(engine),
        canary=canary,
        files=(*mapped_files(), *unmapped_files(files, options)),
        system_tokens=system_tokens,
        stages_ms=stages.ms,
    )
    return loaded, parked


def _rehearse() -> None:
    """Run the first steps of every launch once, so that the dump contains their results."""
    from edgeinfer.tui.rehearsal import rehearse  # imports every screen of the chat

    for verb in LAUNCH_VERBS:
        build_parser(verb)
    load_config(Path(os.devnull))
    app_process.reseed(os.urandom(64), [])
    rehearse()  # draws the chat without a terminal, which halves the time of a launch's first frame


def mapped_files() -> tuple[str, ...]:
    paths = {area.path for area in areas()}
    return tuple(sorted(path for path in paths if path.startswith("/") and os.path.isfile(path)))


def _disconnect(link: socket.socket, parked: ParkedProcess) -> None:
    """Send the report to the builder, then replace the builder's socket by an unconnected one."""
    # free unreachable sockets now: if one were freed later, it would close its descriptor number, which
    # may be reused below
    gc.collect()
    unconnected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    parked = msgspec.structs.replace(
        parked,
        pid=os.getpid(),
        link_inode=os.fstat(unconnected.fileno()).st_ino,
        wake_inode=os.fstat(WAKE_FD).st_ino,
    )
    messages.send(link, messages.Payload(content=msgspec.json.encode(parked)))
    gc.freeze()  # later collections skip these objects, so the collector writes to no shared page
    process.redirect_to_null()
    fd = unconnected.detach()
    link.detach()
    process.close_all_but(fd, LINK_FD, WAKE_FD)
    os.dup2(fd, LINK_FD)  # must be last: dup2 closes the builder's socket, which starts the dump
    os.close(fd)


def main() -> None:
    """Load the model and wait for the dump; in each resumed process, run its launch request."""
    link = socket.socket(fileno=LINK_FD)
    received = messages.receive(link)
    if received is None or not isinstance(received[0], messages.Payload):
        os._exit(1)
    try:
        inputs = msgspec.json.decode(received[0].content, type=SnapshotInputs)
        loaded, parked = load_and_park(link, inputs)
    except (EdgeInferError, OSError) as error:
        message = f"the process could not be prepared for the snapshot: {error}"
        problem = error if isinstance(error, EdgeInferError) else DumpError(message)
        messages.send(link, messages.Failed(error=to_fields(problem)))
        os._exit(1)
    # read these memory ranges before the dump: in a restored process, /proc/self/smaps no longer marks
    # them
    loaded.droppable = app_process.read_droppable_ranges()
    resumed_ns = _sleep(link, parked, loaded)
    link = socket.socket(fileno=LINK_FD)
    app_process.run_app(link, messages.receive(link), loaded, resumed_ns)


def _sleep(link: socket.socket, parked: ParkedProcess, loaded: LoadedModel) -> int:
    """Wait to be dumped and resumed; return the time of the resume (monotonic, ns)."""
    sleeper = select.poll()
    sleeper.register(WAKE_FD, select.POLLIN)
    _disconnect(link, parked)
    app_process.clear_random_state(loaded.droppable)
    sleeper.poll()  # CRIU dumps the process during this call
    resumed_ns = time.monotonic_ns()
    os.close(WAKE_FD)
    return resumed_ns


if __name__ == "__main__":
    # run the imported `main`: classes of `__main__` would differ from those that other modules import
    from edgeinfer.snapshots import parked

    parked.main()
