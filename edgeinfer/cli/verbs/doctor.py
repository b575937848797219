"""`edgeinfer doctor`: check this machine, and print commands that fix what is wrong.

`CHECKS` lists the checks: functions that return one or more `Finding`s.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from edgeinfer import __version__, error_text, typed_options
from edgeinfer.cli.parser import add_option
from edgeinfer.cli.result import Result
from edgeinfer.config.config_file import (
    Config,
    append_config_key,
    config_path,
    load_config,
    way_out_of_offline,
)
from edgeinfer.errors import EdgeInferError, ModelNotPulledError, ShippingError
from edgeinfer.host import EngineHost
from edgeinfer.platform import paths
from edgeinfer.platform.disk import free_bytes
from edgeinfer.runtime.llama.backends import LoadedBackend, MissingBackend, describe
from edgeinfer.shipping import payload, shipped, unpack
from edgeinfer.shipping.payload import Index
from edgeinfer.units import format_bytes

Status = Literal["ok", "todo", "warn", "fail"]
#: Instruction sets that llama.cpp uses, as named in /proc/cpuinfo.
CPU_FEATURES = """
    sse4_2 avx f16c fma avx2 bmi2 avx512f avx512_vnni avx512_bf16 avx_vnni amx_int8
    asimd asimdhp asimddp i8mm sve sve2
""".split()
GIB = 1 << 30
_MARKS = {"ok": "ok  ", "todo": "todo", "warn": "warn", "fail": "FAIL"}


class Finding(msgspec.Struct, frozen=True):
    """What the check `name` has found; `fix` is a command or advice.

    Status "todo": the next step on a new machine; "warn": slow, or without a feature; "fail": unusable.
    """

    status: Status
    found: str
    fix: str = ""
    name: str = ""


class DoctorResult(Result, frozen=True, kw_only=True):
    """All findings; the exit status is 1 if one is a "fail"."""

    version: str
    checks: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        return 1 if any(check.status == "fail" for check in self.checks) else 0

    def human(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = [f"edgeinfer {self.version}"]
        for check in self.checks:
            lines.append(f"  {_MARKS[check.status]}  {check.name:<{width}}  {check.found}")
            if check.fix:
                lines.append(f"  {'':{width + 6}}  → {check.fix}")
        return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--verify", "instead compare every byte of the unpacked program with the build")


def run(options: argparse.Namespace, _host: EngineHost) -> Result:
    """Run every check, without changing anything. `--verify` may raise ShippingError."""
    if options.verify:
        return _verify()
    results = itertools.starmap(_run_check, CHECKS.items())
    return DoctorResult(version=__version__, checks=tuple(itertools.chain(*results)))


def _run_check(name: str, check: Callable[[], Finding | list[Finding]]) -> list[Finding]:
    try:
        findings = check()
    except EdgeInferError as error:
        findings = Finding("fail", error.message, error_text.hint(error))
    except PermissionError as error:
        findings = Finding("fail", f"{error.filename}: {error.strerror}", paths.DENIED_HINT)
    except Exception as error:  # noqa: BLE001  # one broken check must not end the others
        findings = Finding("fail", f"could not be checked: {error!r}")
    findings = findings if isinstance(findings, list) else [findings]
    return [msgspec.structs.replace(finding, name=name) for finding in findings]


def _python() -> Finding:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return Finding("ok", f"{platform.python_version()}, {system}")


def _cpu() -> Finding:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        flags = re.search(r"^(?:flags|Features).*", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        flags = None
    if flags is None:
        return Finding("ok", f"{allowed} threads")
    features = [feature for feature in CPU_FEATURES if feature in flags[0].split()]
    text = f"{allowed} threads; {' '.join(features) or 'no vector extensions'}"
    fast = "asimddp" if "asimd" in features else "avx2"
    if fast not in features:
        return Finding("warn", text, f"decoding is slow without {fast}: prefer a model under 1 GB")
    return Finding("ok", text)


def _memory() -> Finding:
    from edgeinfer.platform.machine import read_memory

    memory = read_memory()
    text = f"{memory.available_bytes / GIB:.1f} GiB available of {memory.total_bytes / GIB:.1f} GiB"
    if memory.available_bytes < GIB:
        if memory.reason.startswith("the limit"):
            limit = f"a limit of {memory.total_bytes / GIB:.1f} GiB is set ({memory.reason})"
            return Finding("warn", text, f"{limit}: raise it, or use a small context: --ctx 1024")
        return Finding("warn", text, "close other programs, or use a small context: --ctx 1024")
    return Finding("ok", text)


def _llama() -> Finding:
    from edgeinfer.runtime.llama.libllama import build_info

    build = build_info()
    variant = f"{build.cpu_variant} variant, " if build.cpu_variant else ""
    kernels = f"edgeinfer's kernels ({build.kernels})" if build.kernels else "llama.cpp's kernels"
    version = f"{build.llama_version} ({build.ggml_commit})"
    return Finding("ok", f"{version}; {variant}{kernels}: {' '.join(build.flags)}")


def _gpu() -> list[Finding]:
    from edgeinfer.platform.machine import read_gpus
    from edgeinfer.runtime.llama import backends

    cards, answers = read_gpus(), [backends.ask(file.name) for file in backends.available()]
    is_used = any(d.kind != "software" for a in answers for d in getattr(a, "devices", ()))
    checks = [_backend(answer, cards, is_used=is_used) for answer in answers]
    if backends.find("cuda") is None:
        driver = backends.driver_problem()
        if driver is None:
            text = "cuda: NVIDIA's driver can run it, but its library is not installed"
            checks.append(Finding("ok", text, backends.how_to_add("cuda")))
        elif not driver.absent:
            checks.append(Finding("warn", f"NVIDIA's driver: {driver.reason}", driver.fix))
    if not answers and cards:
        text = f"{' and '.join(cards)} found, but no library for it"
        checks.insert(0, Finding("warn", text, backends.how_to_add("vulkan")))
    return checks or [Finding("ok", "no GPU found, and no GPU library installed")]


def _backend(
    answer: LoadedBackend | MissingBackend, cards: tuple[str, ...], *, is_used: bool
) -> Finding:
    """Describe a GPU library: its devices, or why there are none. `is_used`: some library has a GPU."""
    if isinstance(answer, MissingBackend):
        bus = f"{' and '.join(cards)} on the bus" if cards else "no GPU on the bus"
        description = f"{describe(answer)}; {bus}"
        missed = (bool(cards) and not is_used) or not answer.absent
        return Finding("warn", description, answer.fix) if missed else Finding("ok", description)
    fix = answer.warning
    if all(device.kind == "software" for device in answer.devices):
        fix = "a software device is slower than the CPU: leave it unused with --gpu-layers none"
    return Finding("warn" if fix else "ok", describe(answer), fix)


def _snapshots() -> Finding:
    if sys.platform != "linux":
        return Finding("warn", "snapshots need Linux; launches are cold")
    from edgeinfer.snapshot_format.criu import probe

    probed = probe()
    if probed.tier is None:
        return Finding("warn", f"launches are cold: {probed.reason}", probed.fix)
    from edgeinfer.launcher import builds
    from edgeinfer.snapshots import registry

    failed = registry.list_current_failures()
    if failed:
        named = "; ".join(f"snapshot {each.name} could not be built: {each.message}" for each in failed)
        return Finding("warn", f"{probed.tier}: {probed.reason}; {named}", failed[0].command)
    unseen = {
        name: (reason, command)
        for name, (reason, command) in builds.failures().items()
        if registry.has_inputs(command)
    }
    if unseen:
        name, (reason, command) = unseen.popitem()
        last = f"snapshot {name} was not built in the background: {reason}; see {builds.log_file()}"
        return Finding("warn", f"{probed.tier}: {probed.reason}; {last}", command)
    return Finding("ok", f"{probed.tier}: {probed.reason}")


def _sandbox() -> Finding:
    from edgeinfer.tools.sandbox import Sandbox

    if sys.platform != "linux":
        return Finding("ok", "not available: the tools shell and python need Linux")
    if refused := Sandbox(Path(tempfile.gettempdir()), ("shell",), 10.0).missing_support():
        return Finding("warn", f"the tools shell and python are not available: {refused}")
    return Finding("ok", "the tools shell and python can be enabled")


def _directories() -> Finding:
    places = {"config": paths.config_dir(), "data": paths.data_dir()}
    places |= {"cache": paths.cache_dir(), "run": Path(paths.runtime_path())}
    for path in places.values():
        above = next(p for p in (path, *path.parents) if os.path.exists(p))
        if not os.access(above, os.W_OK | os.X_OK):
            fix = "set EDGEINFER_HOME to a folder that you own"
            return Finding("fail", f"{path} cannot be written", fix)
    free = free_bytes(places["data"])
    text = f"{', '.join(f'{name} {path}' for name, path in places.items())}; {free / GIB:.0f} GiB free"
    fix = "" if free > 2 * GIB else "free disk space, for example by `edgeinfer rm MODEL`"
    return Finding("warn" if fix else "ok", text, fix)


def _configuration() -> Finding:
    from edgeinfer.receipts.receipt import load_key

    config = load_config()
    load_key(config.receipts.key)  # raises ConfigError if `run --receipt` cannot use it
    path = config_path()
    network = "offline" if way_out_of_offline(config) else "network allowed"
    source = path if path.is_file() else "defaults (no file)"
    if folder := config.serve.log_payloads:
        text = f"{source}; {network}; `serve` writes every request and answer to {folder}"
        return Finding("warn", text, "remove `log-payloads` under [serve] to stop that")
    return Finding("ok", f"{source}; {network}")


def _catalogue() -> Finding:
    from edgeinfer.models.catalog import load_catalog
    from edgeinfer.models.external_stores import stores
    from edgeinfer.models.reference import resolve
    from edgeinfer.models.store import list_pulled

    config: Config = load_config()
    n_known, pulled = len(load_catalog()), len(list_pulled())
    n_usable = len(stores.usable())
    external_note = f", {n_usable} of other programs here" if n_usable else ""
    text = f"{n_known} models known, {pulled} pulled{external_note}; default {config.default_model}"
    try:
        resolve(config.default_model).files()
    except ModelNotPulledError:
        text = f"{text}, not pulled yet"
        return Finding("todo", text, f"edgeinfer pull {config.default_model}")
    except EdgeInferError as error:
        append_config_key(error)
        return Finding("fail", f"{text}: {error.message}", error_text.hint(error))
    return Finding("ok", text)


def _larger_than_memory() -> list[Finding]:
    """Describe the default model if its weights do not fit into memory; otherwise return []."""
    from edgeinfer.models import gguf
    from edgeinfer.models.fits import header_plan
    from edgeinfer.models.reference import resolve
    from edgeinfer.platform.machine import read_machine, read_rate
    from edgeinfer.runtime.memory_plan import disk_warning

    config: Config = load_config()
    machine = read_machine()
    paths = [path for path in resolve(config.default_model).parts if path.is_file()]
    if not paths:
        return []
    options = typed_options.load_options(argparse.Namespace(), config.load)
    shape, plan = header_plan([gguf.read_model_header(path) for path in paths], options, machine)
    if not plan.from_disk:
        return []
    warning = disk_warning(shape, machine, plan, read_rate(*paths))
    fix = "a smaller model or quantization fits: edgeinfer list --fits"
    return [Finding("warn", f"{config.default_model}: {warning}", fix)]


CHECKS: dict[str, Callable[[], Finding | list[Finding]]] = {
    "python": _python,
    "cpu": _cpu,
    "memory": _memory,
    "llama.cpp": _llama,
    "gpu": _gpu,
    "snapshots": _snapshots,
    "sandbox": _sandbox,
    "directories": _directories,
    "configuration": _configuration,
    "catalogue": _catalogue,
    "weights": _larger_than_memory,
}


class SelfCheckResult(Result, frozen=True, kw_only=True):
    """Result of `doctor --verify`. `findings` name the unpacked files that differ from the build's."""

    app: str
    file: str
    files_checked: int
    bytes_checked: int
    findings: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        return 5 if self.findings else 0

    def human(self) -> str:
        counts = f"{self.files_checked} files, {format_bytes(self.bytes_checked)} in {self.app}"
        if self.findings:
            advice = f"remove {self.app}: the next start unpacks the program again"
            return "\n".join([f"{counts}:", *self.findings, "", advice])
        payload_note = f"\n{self.file}: its payload is as built" if self.file else ""
        return f"{counts}: all as built{payload_note}"


def _verify() -> SelfCheckResult:
    app = shipped.app_dir()
    if app is None:
        problem = "--verify checks the one-file program, but this edgeinfer is a Python package"
        raise ShippingError(problem, hint="`pip check` checks a package")
    raw = (app / unpack.INDEX).read_bytes() if (app / unpack.INDEX).is_file() else b""
    index = payload.parse_index(raw)
    if index is None or index.name != app.name:
        wrong = (f"{app / unpack.INDEX}: is not the index of {app.name}",)
        return SelfCheckResult(app=str(app), file="", files_checked=0, bytes_checked=0, findings=wrong)
    findings = [*_check_files(app, index), *_foreign_files(app, index)]
    file = shipped.program_file()
    findings += _check_payload(file, index) if file else []
    return SelfCheckResult(
        app=str(app),
        file=str(file or ""),
        files_checked=len(index.files) + len(index.links),
        bytes_checked=index.size,
        findings=tuple(findings),
    )


def _check_files(app: Path, index: Index) -> Iterator[str]:
    for entry in index.files:
        try:
            data = (app / entry.path).read_bytes()
            mode = os.stat(app / entry.path).st_mode & 0o777
        except OSError as error:
            yield f"{entry.path}: {error.strerror}"
            continue
        if entry.path in index.relocate:
            data = payload.relocate(data, "")
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            yield f"{entry.path}: altered"
        elif mode != entry.mode:
            yield f"{entry.path}: mode {mode:o} instead of {entry.mode:o}"
    for path, target in index.links:
        if not os.path.islink(app / path) or os.readlink(app / path) != target:
            yield f"{path}: the link was changed"


def _foreign_files(app: Path, index: Index) -> Iterator[str]:
    links = [path for path, _ in index.links]
    listed = {unpack.INDEX, unpack.SOURCE, *links, *(entry.path for entry in index.files)}
    for folder, _, names in os.walk(app):
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), app)
            if path not in listed:
                yield f"{path}: is not part of edgeinfer"


def _check_payload(file: Path, index: Index) -> Iterator[str]:
    """Yield what is wrong with the payload of `file`; nothing if its version is not that of `index`."""
    try:
        parts = payload.open_shipped(file)
        if parts.app != index.name:
            return
        with file.open("rb") as open_file:
            payload.read_index(open_file, parts)
            for number, block in enumerate(index.blocks):
                raw = payload.block_bytes(open_file.fileno(), parts, block)
                for _ in payload.split_block(raw, [e for e in index.files if e.block == number], file):
                    pass
    except (OSError, EdgeInferError) as error:
        yield str(error)
