"""What a process has loaded, described so that another can load it again, and left where it is found.

It holds what was there before anybody asked anything: a model's files, options, adapters, the system
prompt of `warm --system`. Of requests it holds nothing, and a snapshot that is built from it neither.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from edgeinfer.config.load_options import NO_ADAPTERS, snapshot_options
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.options import Adapter, LoadOptions, ModelFiles
from edgeinfer.snapshots import fingerprint, format

#: Choices that a load makes by what is free at that moment, as far as an option can make them.
_CHOICES = ("kv_type", "flash_attention", "repack")


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded model. `options` are as they were asked for, `became` with what the load chose.

    `adapters` are those that it has now. `stamps` are of the files that were read
    (`fingerprint.stamp`), when they were. `program` is who loaded it (`fingerprint.program_tag`).
    `snapshot` is the name of the one it was resumed from, "" for none, and `given_name` what a person
    has called that one; `url` is where its endpoint listens.
    """

    model: str
    files: ModelFiles
    options: LoadOptions
    became: LoadOptions
    adapters: tuple[Adapter, ...]
    system: str
    stamps: dict[str, str]
    program: str
    is_worker: bool = False
    snapshot: str = ""
    given_name: str = ""
    url: str = ""

    def resumed_from(self, snapshot: str) -> Description:
        """The same, of a process that was resumed from this snapshot, "" for none."""
        given = format.given_part(snapshot, self.model, snapshot_options(self.options))
        return msgspec.structs.replace(self, snapshot=snapshot, given_name=given)

    def of_this_home(self) -> Description:
        """The same, of a process that has come from another home and has its paths already."""
        stamps = stamps_of(self.files, self.options)
        return msgspec.structs.replace(self, program=fingerprint.program_tag(), stamps=stamps)

    def with_adapters(self, adapters: tuple[Adapter, ...]) -> Description:
        """The same with other adapters, read just now."""
        lora = "" if adapters == self.files_adapters() else adapters_text(adapters)
        options = msgspec.structs.replace(self.options, lora=lora)
        paths = [adapter.path for adapter in self.adapters]
        stamps = {path: stamp for path, stamp in self.stamps.items() if path not in paths}
        return msgspec.structs.replace(
            self,
            options=options,
            became=msgspec.structs.replace(self.became, lora=lora),
            adapters=adapters,
            stamps=stamps | stamps_of(self.files, options),
        )

    def files_adapters(self) -> tuple[Adapter, ...]:
        """The adapters that the catalogue names for the model."""
        return LoadOptions().adapters(self.files)


def adapters_text(adapters: Sequence[Adapter]) -> str:
    """The adapters as `LoadOptions.lora` names them."""
    said = [a.path if a.scale == 1 else f"{a.path}:{a.scale:g}" for a in adapters]
    return ",".join(said) or NO_ADAPTERS


def read_files(files: ModelFiles, options: LoadOptions) -> tuple[str, ...]:
    """The paths of all files that a load reads."""
    return (*files.paths, *files.draft_paths, *options.adapter_paths(files))


def stamps_of(files: ModelFiles, options: LoadOptions) -> dict[str, str]:
    """The stamps of those files, as far as they are there: what is missing, loading complains of."""
    return {
        path: fingerprint.stamp(path) for path in read_files(files, options) if os.path.exists(path)
    }


def describe(
    engine: Engine,
    model: str,
    files: ModelFiles,
    options: LoadOptions,
    *,
    system: str,
    stamps: dict[str, str],
) -> Description:
    """Describe what was loaded into this process."""
    return Description(
        model=model,
        files=files,
        options=options,
        became=became(options, engine),
        adapters=engine.info.lora,
        system=system,
        stamps=stamps,
        program=fingerprint.program_tag(),
    )


def became(options: LoadOptions, engine: Engine) -> LoadOptions:
    """The options with every choice made that another load might make otherwise."""
    info = engine.info
    if not info.can_generate:
        return options
    chosen = {name: info.choices[name].value for name in _CHOICES if name in info.choices}
    return msgspec.structs.replace(options, n_ctx=info.n_ctx, n_parallel=info.n_parallel, **chosen)
