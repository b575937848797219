"""`edgeinfer bench`: measure the speed of models, optionally against other servers."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from edgeinfer import __version__, typed_options
from edgeinfer.agents import endpoint
from edgeinfer.bench import MOST_STREAMS, MeasuredServer, Plan, Row, Sample, Target, measure, rows
from edgeinfer.cli import options as shared
from edgeinfer.cli.parser import add_option
from edgeinfer.cli.result import Result
from edgeinfer.cli.terminal import StageProgress, stoppable, table
from edgeinfer.cli.verbs.launch import free_port, own_command
from edgeinfer.config.config_file import save
from edgeinfer.config.load_options import LOAD_OPTIONS
from edgeinfer.errors import ServeError, UsageError
from edgeinfer.host import EngineHost
from edgeinfer.models.reference import resolve
from edgeinfer.platform import paths
from edgeinfer.platform.energy import EnergyMeter
from edgeinfer.platform.machine import describe_machine
from edgeinfer.platform.process import start_child
from edgeinfer.server.guards import keys

_STOP_S = 60.0
_HEAD = ("SERVER", "TEST", "MEDIAN", "SPREAD", "J/TOKEN", "AGAINST THE FIRST")
_LEGEND = (
    "pp: prefill; tg: generation; turn: first token of a next turn; SPREAD: least to greatest; "
    "AGAINST THE FIRST: median ratio to the first server"
)


class BenchResult(Result, frozen=True, kw_only=True):
    """Measured speeds: `rows` has a row for each test and server.

    `load` is the load average at the start. `noise_ms`: times of hashing the same data between the
    tests, which show how busy the machine was. `energy` says how energy was measured, or why not.
    """

    rows: tuple[Row, ...]
    machine: str
    load: float
    noise_ms: tuple[float, ...]
    energy: str
    notes: tuple[str, ...]

    def human(self) -> str:
        cells = [_cells(row) for row in self.rows]
        low, middle, high = statistics.quantiles(self.noise_ms * 2, n=4)
        spread = (high - low) / middle
        enough = f"ignore differences below {spread:.0%}" if spread else "too few rounds for a spread"
        job = f"reference job {middle:.1f} ms ± {spread / 2:.0%}"
        noise = f"noise: {job}, load {self.load:.1f} at the start; {enough}"
        rows = table([_HEAD, ("---",) * len(_HEAD), *cells], right=frozenset({2, 3, 4, 5}), gap=" | ")
        notes = (f"- {note}" for note in (_LEGEND, noise, f"energy: {self.energy}", *self.notes))
        return "\n".join([rows, "", f"edgeinfer {__version__}, {self.machine}", *notes])


def _cells(row: Row) -> tuple[str, ...]:
    digits = max(0, 3 - len(f"{row.median:.0f}"))
    return (
        row.side,
        row.test,
        f"{row.median:.{digits}f} {row.unit}",
        f"{row.least:.{digits}f}–{row.greatest:.{digits}f}",
        "-" if row.joules_per_token is None else f"{row.joules_per_token:.3g}",
        "" if row.beside is None else f"{row.beside:.2f}",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    help = "models, loaded together (default: the configured one)"
    add("models", nargs="*", metavar="MODEL", help=help)
    add_option(
        parser,
        "--against URL[#MODEL]...",
        "an OpenAI-compatible server to compare with: llama-server, Ollama, LM Studio …",
        type=_target,
    )
    for field, flags, kind, text in (
        ("pp", ("-p", "--n-prompt"), _number, "tokens of a prompt; 0: skip this test (default: 512)"),
        ("tg", ("-n", "--n-gen"), _number, "tokens of an answer; 0: skip this test (default: 128)"),
        ("rounds", ("-r", "--repetitions"), shared.count, "rounds (default: 5)"),
        ("depths", ("-d", "--n-depth"), _numbers, "tokens cached before each test (default: 0)"),
        ("streams", ("--streams",), _counts, "concurrent answers (default: 1)"),
    ):
        metavar = "N,…" if kind in (_numbers, _counts) else "N"
        add(*flags, dest=field, type=kind, default=getattr(Plan(), field), metavar=metavar, help=text)
    shared.add_quiet(parser)
    shared.add_load_options(parser)
    shared.add_attached_options(parser)


_number = shared.number_between(int, 0, 1_000_000)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(_number, text.split(","))))


def _counts(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(shared.count, text.split(","))))


def _target(text: str) -> Target:
    url, _, model = text.partition("#")
    with contextlib.suppress(ValueError):
        address = urlsplit(url)
        is_server = address.scheme in ("http", "https") and address.hostname and address.port != 0
        if is_server and "@" not in url:
            return Target(url=url.rstrip("/").removesuffix("/v1"), model=model)
    raise argparse.ArgumentTypeError(f"{text!r} is not http://HOST:PORT or http://HOST:PORT#MODEL")


def run(options: argparse.Namespace, host: EngineHost) -> BenchResult:
    """Measure models and servers in turn. Raises UsageError, ServeError, the errors of `host.files`."""
    plan = msgspec.convert(vars(options), Plan)
    if not plan.pp and not plan.tg:
        raise UsageError("-p 0 with -n 0 leaves nothing to measure", hint="leave out one of them")
    if max(plan.streams) > MOST_STREAMS:
        problem = f"--streams {max(plan.streams)} is too many concurrent answers"
        raise UsageError(problem, hint=f"use at most {MOST_STREAMS}: `--streams {MOST_STREAMS}`")
    meter, load = EnergyMeter(), os.getloadavg()[0]
    models = [resolve(name) for name in options.models or [host.config.default_model]]
    draft = typed_options.load_options(options, host.config.load).draft
    names = [host.files(ref, draft=draft).name for ref in models]
    names += [target.label for target in options.against]
    names = [
        f"{n} ({names[:i].count(n) + 1})" if names.count(n) > 1 else n for i, n in enumerate(names)
    ]
    with (
        stoppable("stopped"),
        StageProgress(sys.stderr, quiet=options.quiet) as progress,
        _StartedEndpoints(options) as servers,
    ):
        targets = [*(servers.start(ref.text) for ref in models), *options.against]
        named = zip(names, targets, strict=True)
        sides = [MeasuredServer(name, target, servers.conversation, meter) for name, target in named]
        rounds, noise = asyncio.run(measure(sides, plan, progress.report))
        for number, samples in enumerate(rounds):
            for side, ref in zip(sides, models, strict=False):
                progress.report(f"start {number + 1} of {plan.rounds}: {side.name}", None)
                samples[side.name] |= servers.measure_start(ref.text, side)
    return BenchResult(
        rows=tuple(rows(rounds, names)),
        machine=describe_machine(),
        load=load,
        noise_ms=tuple(noise),
        energy=f"not readable: {meter.reason}" if meter.reason else meter.source,
        notes=tuple(sorted(set[str]().union(*(side.notes for side in sides)))),
    )


class _StartedEndpoints:
    """Starts an endpoint for each model, with the typed load options, and stops it afterwards.

    The endpoints build no snapshots and record no usage. The cached prefixes of `conversation` are
    deleted at the end.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        values = {option.flag: getattr(options, option.field, None) for option in LOAD_OPTIONS}
        self._typed = [f"{flag}={v}" for flag, v in values.items() if flag and v is not None]
        self.conversation = f"bench-{secrets.token_hex(8)}"
        self._pids: dict[str, int] = {}

    def __enter__(self) -> _StartedEndpoints:
        self._folder = tempfile.mkdtemp(prefix="edgeinfer-bench-")
        config = Path(self._folder) / "config.toml"
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(paths.config_file(), config)
        save(("snapshots", "auto-warm"), False, config)
        save(("drift", "record"), False, config)
        self._environment = {**os.environ, "EDGEINFER_CONFIG": str(config)}
        return self

    def __exit__(self, *_: Any) -> None:
        # slow import: numpy takes 80 ms
        from edgeinfer.runtime.prefix_cache.retention import forget_conversations

        for url in list(self._pids):
            self._stop(url)
        forget_conversations(paths.blocks_dir(), self.conversation)
        shutil.rmtree(self._folder)

    def start(self, model: str) -> Target:
        """Start an endpoint with `model` and return its address. Raises ServeError."""
        where = ["--log=json", "--host=127.0.0.1", f"--port={free_port()}"]
        command = [*own_command(), "serve", model, *where, *self._typed]
        remote, pid = endpoint.start(command, keys.own_key(), self._environment, dies_with_parent=True)
        self._pids[remote.url] = pid
        return Target(url=remote.url, model=remote.model, key=remote.key)

    def _stop(self, url: str) -> None:
        pid = self._pids.pop(url)
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def measure_start(self, model: str, side: MeasuredServer) -> dict[str, Sample]:
        """Stop an endpoint; return exec to first token (ms) of `run`, then of a new endpoint, by name.

        The new endpoint continues a conversation that the old one had cached. Raises ServeError.
        """
        self._stop(side.target.url)
        command = [*own_command(), "run", model, "Hello", "--max-tokens=4", "--timings", *self._typed]
        pipe = subprocess.PIPE
        began = time.perf_counter()
        with start_child(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=self._environment
        ) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            ms = (time.perf_counter() - began) * 1000
            errors = process.communicate()[1].decode(errors="replace").strip()
        if process.returncode:
            raise ServeError(f"`edgeinfer run` failed: {errors}", hint="run `edgeinfer run` to see why")
        start_kind = "resumed" if ": resumed in " in errors else "cold"
        samples = {f"exec to token, {start_kind}": Sample(ms, "ms")}
        began = time.perf_counter()
        side.target = self.start(model)
        if side.last_prompt:
            asyncio.run(side.turn())
            ms = (time.perf_counter() - began) * 1000
            samples[f"exec to {side.last_turn}, restarted"] = Sample(ms, "ms")
        return samples
