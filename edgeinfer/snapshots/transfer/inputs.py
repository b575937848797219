"""What a snapshot was made of, as its exporter has it: the files of its models and its adapters."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from edgeinfer.config.load_options import DRAFT, LORA, NO_ADAPTERS
from edgeinfer.errors import SnapshotError, UsageError
from edgeinfer.models import names, store
from edgeinfer.platform.disk import sha256_of, stamps
from edgeinfer.runtime.options import Adapter, parse_adapters
from edgeinfer.snapshots import format
from edgeinfer.snapshots.transfer import packing
from edgeinfer.snapshots.transfer.description import AdapterFile, DraftModel, ModelFile
from edgeinfer.snapshots.transfer.packing import Packed


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """The files that were read to build a snapshot."""

    model: tuple[ModelFile, ...]
    draft: DraftModel | None
    adapters: tuple[AdapterFile, ...]

    @property
    def models(self) -> tuple[ModelFile, ...]:
        """The files of the model and of its draft model."""
        return self.model + (self.draft.files if self.draft else ())

    def layers(self) -> list[Packed]:
        """A layer for each file; files that are alike have one."""
        models = {one.member: one.path for one in self.models}
        adapters = {one.member: one.path for one in self.adapters}
        return [*_layers("model", models), *_layers("adapter", adapters)]


def _layers(role: str, files: dict[str, str]) -> list[Packed]:
    return [packing.stored(role, [packing.whole(Path(path), member)]) for member, path in files.items()]


def gather(manifest: format.Manifest) -> Inputs:
    """Raises SnapshotError for what another machine could not know by a name."""
    found = Inputs(
        model=_files(manifest.model, "edgeinfer warm NAME"),
        draft=_draft(manifest),
        adapters=_adapters(manifest),
    )
    known = {path for file in found.models for path in (file.path, file.mapped)}
    known |= {adapter.path for adapter in found.adapters}
    _refuse_others(manifest, (path for path in manifest.files if path not in known))
    return found


def _files(model: str, warm: str) -> tuple[ModelFile, ...]:
    """Return the files of a pulled model. Raises SnapshotError for another."""
    is_file = names.is_path(model) or "/" in model
    pulled = None if is_file else store.find_pulled(model)
    if pulled is None or pulled.name != model:
        first = f"`edgeinfer pull {model} --name NAME`, then "
        if pulled is not None:
            first = f"it is called {pulled.name}: "
            warm = warm.replace("NAME", pulled.name)
        raise SnapshotError(
            f"{model} is no name that another machine could know the model by", hint=f"{first}`{warm}`"
        )
    return tuple(
        ModelFile(
            path=str(path), mapped=os.path.realpath(path), size=file.size_bytes, sha256=file.sha256
        )
        for path, file in zip(pulled.paths, pulled.files, strict=True)
    )


def _draft(manifest: format.Manifest) -> DraftModel | None:
    name = manifest.requested.get(DRAFT.field, "")
    if name in ("", "none"):
        return None
    return DraftModel(name=name, files=_files(name, f"edgeinfer warm {manifest.model} --draft NAME"))


def _adapters(manifest: format.Manifest) -> tuple[AdapterFile, ...]:
    return tuple(map(_adapter, parse_adapters(manifest.requested.get(LORA.field, NO_ADAPTERS))))


def _adapter(adapter: Adapter) -> AdapterFile:
    path = Path(adapter.path)
    try:
        names.model_name(adapter.name)
    except UsageError as error:
        raise SnapshotError(
            f"the adapter {path.name} has no name that another machine could store it under",
            hint=f"{error.hint}: rename the file, and `edgeinfer warm` with it again",
        ) from error
    return AdapterFile(
        name=adapter.name,
        scale=adapter.scale,
        path=adapter.path,
        stamp=stamps([os.path.realpath(path)]),
        size=path.stat().st_size,
        sha256=sha256_of(path, lambda _done: None),
    )


def _refuse_others(manifest: format.Manifest, unknown: Iterable[str]) -> None:
    others = [os.path.basename(path) for path in unknown if path.endswith(".gguf")]
    if not others:
        return
    here = store.model_files(manifest.model)
    words = [f"{one.flag} {text}" for one, text in ((LORA, here.lora), (DRAFT, here.draft)) if text]
    raise SnapshotError(
        f"{manifest.name} was made with {', '.join(others)}, which your models.toml names: another "
        "machine's may not",
        hint=f"build one that names it itself: `edgeinfer warm {manifest.model} {' '.join(words)}`",
    )
