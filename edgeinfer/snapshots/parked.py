"""The process that a snapshot captures: it loads, prefills, and waits.

`python -m edgeinfer.snapshots.parked` has the builder's socket as descriptor LINK_FD and a pipe of the
builder as WAKE_FD. At the dump its standard streams are /dev/null, and it has an unconnected socket and
an empty pipe; a restore replaces these by the launcher's link and a pipe with one byte. The process has
never seen a user's environment, terminal, prompt or key: the builder sets its environment.
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
from edgeinfer.snapshot_format.format import LINK_FD, WAKE_FD
from edgeinfer.snapshots.inputs import SnapshotInputs, actual_options, describe, unmapped_files
from edgeinfer.snapshots.restore import app_process
from edgeinfer.snapshots.restore.loaded_model import LoadedModel, actual

if TYPE_CHECKING:
    from edgeinfer.runtime.engine import LlamaEngine

#: Our packages of which every module is imported before the dump.
OWN_PACKAGES = "cli chat runtime server snapshots tui workers".split()
#: Modules that a launch would import. tests/snapshots/test_resume.py keeps the list complete.
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
    """The process's facts before it disconnects from the builder. `files` are mapped or read.

    `pid` and the inodes of its link and its wake pipe are needed to restore it.
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
    """Import the installed modules that chat, run and serve need."""
    names = [*LAZY_MODULES]
    for package in (f"edgeinfer.{name}" for name in OWN_PACKAGES):
        modules = pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
        names += [module.name for module in modules if not module.name.endswith("__main__")]
    for name in names:
        with contextlib.suppress(ImportError):  # the module needs an optional dependency
            importlib.import_module(name)
    widgets = sys.modules.get("textual.widgets")
    for name in getattr(widgets, "__all__", ()):
        with contextlib.suppress(ImportError):
            getattr(widgets, name)


class Stages:
    """Reports the stages of a build over a link; `ms` is each stage's duration."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._name, self._since = "", time.monotonic()
        self.ms: dict[str, float] = {}

    def begin(self, name: str) -> None:
        """End the current stage and begin the next ("" for none)."""
        now = time.monotonic()
        if self._name:
            self.ms[self._name] = round((now - self._since) * 1000, 1)
        self._name, self._since = name, now
        if name:
            self.report(None)

    def report(self, fraction: float | None) -> None:
        """Report the finished fraction of the stage."""
        done = "" if fraction is None else f"{fraction:.4f}"
        messages.send(self._link, messages.Stage(name=self._name, fraction=done))


def load_and_park(link: socket.socket, inputs: SnapshotInputs) -> tuple[LoadedModel, ParkedProcess]:
    """Load, warm up, prefill and park as the builder requests. Raises what loading raises."""
    from edgeinfer.runtime.engine import load_engine  # 160 to 290 ms: llama_cpp

    files, options = inputs.files, inputs.options
    # prefill the system prompt of launches that give none
    loadable = msgspec.structs.replace(files, system_prompt=inputs.system)
    stages = Stages(link)
    stages.begin("load")
    # llama.cpp loads without Python, and the imports run without llama.cpp
    with ThreadPoolExecutor(1) as loader:
        loading = loader.submit(
            load_engine, loadable, options, lambda _stage, fraction: stages.report(fraction)
        )
        import_everything()
        _rehearse()
        engine: LlamaEngine = loading.result()
    if inputs.actual is not None and actual_options(options, engine) != inputs.actual:
        engine.close()  # other memory was free at this load, so it chose other options
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
    # a prompt and some tokens: reads every weight as a prefill and as a decode step do
    canary = loaded.canary()
    engine.park()
    loaded.weights = mapped_weights()
    stages.begin("")
    parked = ParkedProcess(
        info=engine.info,
        actual=actual(engine),
        canary=canary,
        files=(*mapped_files(), *unmapped_files(files, options)),
        system_tokens=system_tokens,
        stages_ms=stages.ms,
    )
    return loaded, parked


def _rehearse() -> None:
    """Run the first steps of every launch once, so that their tables are in the dump."""
    from edgeinfer.tui.rehearsal import rehearse  # imports everything else, too

    for verb in LAUNCH_VERBS:
        build_parser(verb)
    load_config(Path(os.devnull))
    app_process.reseed(os.urandom(64), [])
    rehearse()  # the chat without a terminal: halves the time of its first paint


def mapped_files() -> tuple[str, ...]:
    paths = {area.path for area in areas()}
    return tuple(sorted(path for path in paths if path.startswith("/") and os.path.isfile(path)))


def _disconnect(link: socket.socket, parked: ParkedProcess) -> None:
    """Answer the builder, then replace its socket by an unconnected one."""
    gc.collect()  # must be first: closing leftovers could close the descriptor number of `mine`
    mine = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    parked = msgspec.structs.replace(
        parked,
        pid=os.getpid(),
        link_inode=os.fstat(mine.fileno()).st_ino,
        wake_inode=os.fstat(WAKE_FD).st_ino,
    )
    messages.send(link, messages.Payload(content=msgspec.json.encode(parked)))
    gc.freeze()  # keep all objects: collections after a resume neither visit nor write them
    process.redirect_to_null()
    number = mine.detach()
    link.detach()
    process.close_all_but(number, LINK_FD, WAKE_FD)
    os.dup2(number, LINK_FD)  # must be last: the builder dumps once its socket is closed
    os.close(number)


def main() -> None:
    """Park and, once resumed, run the launch request."""
    link = socket.socket(fileno=LINK_FD)
    received = messages.receive(link)
    if received is None or not isinstance(received[0], messages.Payload):
        os._exit(1)
    try:
        inputs = msgspec.json.decode(received[0].content, type=SnapshotInputs)
        loaded, parked = load_and_park(link, inputs)
    except (EdgeInferError, OSError) as error:
        problem = error if isinstance(error, EdgeInferError) else DumpError(f"parking failed: {error}")
        messages.send(link, messages.Failed(error=to_fields(problem)))
        os._exit(1)
    loaded.droppable = app_process.read_droppable_ranges()  # a restore loses these flags
    resumed_ns = _sleep(link, parked, loaded)
    link = socket.socket(fileno=LINK_FD)
    app_process.run_app(link, messages.receive(link), loaded, resumed_ns)


def _sleep(link: socket.socket, parked: ParkedProcess, loaded: LoadedModel) -> int:
    """Disconnect from the builder and wait for the resume; return its time (monotonic clock, ns)."""
    sleeper = select.poll()
    sleeper.register(WAKE_FD, select.POLLIN)
    _disconnect(link, parked)
    app_process.clear_random_state(loaded.droppable)
    sleeper.poll()  # the dump happens here
    resumed_ns = time.monotonic_ns()
    os.close(WAKE_FD)
    return resumed_ns


if __name__ == "__main__":
    from edgeinfer.snapshots import parked  # so that classes are not those of `__main__`

    parked.main()
