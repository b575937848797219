"""The inputs of a snapshot: model files, load options and system prompt."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Sequence

import msgspec

from edgeinfer.config.load_options import NO_ADAPTERS, snapshot_options
from edgeinfer.launcher.selection import warm_flags
from edgeinfer.platform.paths import is_model_path
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.options import Adapter, LoadOptions, ModelFiles
from edgeinfer.snapshot_format import fingerprint, storage

#: Load options that may be "auto": the load then chooses a value that fits the free memory.
_CHOICES = ("kv_type", "flash_attention")


class SnapshotInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a snapshot: model files, load options and a system prompt.

    `given_name` is the name that the user chose; with "", the name is derived from the options. To
    repeat an earlier load exactly, `actual` has the option values and `adapters` the adapters of that
    load; otherwise both are None. `stamps` maps paths to size, mtime and inode before the load.
    """

    model: str
    files: ModelFiles
    options: LoadOptions
    system: str = ""
    given_name: str = ""
    actual: LoadOptions | None = None
    adapters: tuple[Adapter, ...] | None = None
    stamps: dict[str, str] = {}

    @property
    def name(self) -> str:
        return storage.snapshot_name(self.model, snapshot_options(self.options), self.given_name)

    @property
    def depends_on(self) -> str:
        """SHA-256 (hex) of program, machine, files, options and system prompt.

        Raises OSError if a file is missing.
        """
        adapters = self.options.adapters(self.files) if self.adapters is None else self.adapters
        inputs = (self.files, snapshot_options(self.options), self.system, _without_digests(adapters))
        stamps = fingerprint.package_stamps()
        stamps |= {path: fingerprint.stamp(path) for path in read_files(self.files, self.options)}
        parts = (*fingerprint.machine_keys().items(), msgspec.json.encode(inputs), *stamps.items())
        return hashlib.sha256(repr(parts).encode("utf-8", "surrogateescape")).hexdigest()

    @property
    def warm_command(self) -> str:
        """Command that builds this snapshot."""
        flags = warm_flags(snapshot_options(self.options))
        typed = [f"{flag}={value}" for flag, value in flags.items()]
        typed += [f"--system={self.system}"] * (self.system != self.files.system_prompt)
        typed += [f"--name={self.given_name}"] * bool(self.given_name)
        return shlex.join(["edgeinfer", "warm", self.model, *typed])

    @property
    def options_to_repeat(self) -> LoadOptions:
        """Options of the load: `actual` if an earlier load is to be repeated, otherwise `options`."""
        return self.actual or self.options


class ProcessDescription(SnapshotInputs, frozen=True, kw_only=True):
    """The model and options in a running process, which publishes them for `ps` and `snapshots take`.

    `program` identifies the process's installation (`fingerprint.program_tag`), `snapshot` the snapshot
    that it was resumed from ("" after a cold start), `url` its endpoint ("" if it has none). A
    worker (`is_worker`) computes for another process of its launch.
    """

    program: str
    is_worker: bool = False
    snapshot: str = ""
    url: str = ""

    def is_of(self, model: str) -> bool:
        """Return whether `model` is the loaded model's name, in any letter case, or its path."""
        names = {self.model} if is_model_path(self.model) else {self.model, self.files.name}
        return storage.model_prefix(model) in map(storage.model_prefix, names)

    def resumed_from(self, snapshot: str) -> ProcessDescription:
        """Return a copy for a process that was resumed from this snapshot ("" for none)."""
        name = storage.user_name_of(snapshot)
        return msgspec.structs.replace(self, snapshot=snapshot, given_name=name)

    def with_adapters(self, adapters: tuple[Adapter, ...]) -> ProcessDescription:
        """Return a copy with these adapters, and size, mtime and inode of their files in `stamps`."""
        from_catalogue = LoadOptions().adapters(self.files)
        lora = "" if _without_digests(adapters) == from_catalogue else adapters_text(adapters)
        options = msgspec.structs.replace(self.options, lora=lora)
        paths = [adapter.path for adapter in self.adapters or ()]
        stamps = {path: stamp for path, stamp in self.stamps.items() if path not in paths}
        return msgspec.structs.replace(
            self,
            options=options,
            actual=msgspec.structs.replace(self.options_to_repeat, lora=lora),
            adapters=adapters,
            stamps=stamps | stamps_of(self.files, options),
        )


def describe(engine: Engine, inputs: SnapshotInputs) -> ProcessDescription:
    return ProcessDescription(
        model=inputs.model,
        files=inputs.files,
        options=inputs.options,
        system=inputs.system,
        actual=actual_options(inputs.options, engine),
        adapters=engine.info.lora,
        stamps=inputs.stamps,
        program=fingerprint.program_tag(),
    )


def actual_options(options: LoadOptions, engine: Engine) -> LoadOptions:
    """Return `options` with the values that the load of `engine` chose, for example for "auto"."""
    info = engine.info
    if not info.can_generate:
        return options
    chosen = {name: info.choices[name].value for name in _CHOICES if name in info.choices}
    return msgspec.structs.replace(options, n_ctx=info.n_ctx, n_parallel=info.n_parallel, **chosen)


def _without_digests(adapters: tuple[Adapter, ...]) -> tuple[Adapter, ...]:
    """Return the adapters without the digests, which are known only after a load."""
    return tuple(msgspec.structs.replace(adapter, sha256="") for adapter in adapters)


def adapters_text(adapters: Sequence[Adapter]) -> str:
    """Return adapters as `LoadOptions.lora` has them: `/a.gguf,/b.gguf:0.5`."""
    texts = [a.path if a.scale == 1 else f"{a.path}:{a.scale:g}" for a in adapters]
    return ",".join(texts) or NO_ADAPTERS


def read_files(files: ModelFiles, options: LoadOptions) -> tuple[str, ...]:
    return (*files.paths, *files.draft_paths, *unmapped_files(files, options))


def unmapped_files(files: ModelFiles, options: LoadOptions) -> tuple[str, ...]:
    """List the files that a load reads into memory without mapping them: projector, adapters."""
    projector = (files.projector,) if files.projector else ()
    return (*projector, *options.adapter_paths(files))


def stamps_of(files: ModelFiles, options: LoadOptions) -> dict[str, str]:
    """Return path → size, mtime and inode (a text) of each file that a load with `options` reads.

    Missing files are left out, because the load reports them.
    """
    existing = filter(os.path.exists, read_files(files, options))
    return {path: fingerprint.stamp(path) for path in existing}
