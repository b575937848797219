"""The inputs of a snapshot: what its process loads, and with which options."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import msgspec

from edgeinfer.config.load_options import NO_ADAPTERS, snapshot_options
from edgeinfer.platform.paths import is_model_path
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.options import Adapter, LoadOptions, ModelFiles
from edgeinfer.snapshot_format import fingerprint, storage

#: Options that may be "auto": a load then chooses their values by the free memory.
_CHOICES = ("kv_type", "flash_attention")


class SnapshotInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What the process of a snapshot loads: model files, load options and a system prompt.

    `given_name` is the name that the user chose, "" for the derived one. To repeat an earlier load
    exactly, `actual` has the values that it chose for the options, and `adapters` those it had loaded.
    `stamps` (`fingerprint.stamp`) are taken before the files are read, so that changes are noticed.
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
        """SHA-256 (hex) of program, machine, files and options. Raises OSError if a file is missing."""
        adapters = self.options.adapters(self.files) if self.adapters is None else self.adapters
        inputs = (self.files, snapshot_options(self.options), self.system, _without_digests(adapters))
        stamps = fingerprint.package_stamps()
        stamps |= {path: fingerprint.stamp(path) for path in read_files(self.files, self.options)}
        parts = (*fingerprint.machine_keys().items(), msgspec.json.encode(inputs), *stamps.items())
        return hashlib.sha256(repr(parts).encode("utf-8", "surrogateescape")).hexdigest()

    @property
    def options_to_repeat(self) -> LoadOptions:
        """Options of the load: those that an earlier load chose, if that one is to be repeated."""
        return self.actual or self.options


class ProcessDescription(SnapshotInputs, frozen=True, kw_only=True):
    """What a running process has loaded; `ps` and `snapshots take` read it from that process.

    `program` identifies its installation (`fingerprint.program_tag`). `snapshot` is the name of the
    snapshot that it was resumed from, "" for none. `url` is its endpoint's address.
    """

    program: str
    is_worker: bool = False
    snapshot: str = ""
    url: str = ""

    def is_of(self, model: str) -> bool:
        """Return whether `model` names the loaded model, in any letter case, or is its file."""
        names = {self.model} if is_model_path(self.model) else {self.model, self.files.name}
        return storage.model_prefix(model) in map(storage.model_prefix, names)

    def resumed_from(self, snapshot: str) -> ProcessDescription:
        """Return a copy for a process that was resumed from this snapshot ("" for none)."""
        name = storage.user_name_of(snapshot)
        return msgspec.structs.replace(self, snapshot=snapshot, given_name=name)

    def with_adapters(self, adapters: tuple[Adapter, ...]) -> ProcessDescription:
        """Return a copy with these adapters instead, and with new stamps of their files."""
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
    """Return the options with the values that the load chose, to repeat it exactly."""
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
    said = [a.path if a.scale == 1 else f"{a.path}:{a.scale:g}" for a in adapters]
    return ",".join(said) or NO_ADAPTERS


def read_files(files: ModelFiles, options: LoadOptions) -> tuple[str, ...]:
    return (*files.paths, *files.draft_paths, *unmapped_files(files, options))


def unmapped_files(files: ModelFiles, options: LoadOptions) -> tuple[str, ...]:
    """List the files that a load reads into memory without mapping them: projector, adapters."""
    projector = (files.projector,) if files.projector else ()
    return (*projector, *options.adapter_paths(files))


def stamps_of(files: ModelFiles, options: LoadOptions) -> dict[str, str]:
    """Return the stamps of all existing files of a model; the load reports missing ones."""
    existing = filter(os.path.exists, read_files(files, options))
    return {path: fingerprint.stamp(path) for path in existing}
