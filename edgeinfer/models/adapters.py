"""Pull LoRA adapters and convert them to GGUF. `--lora NAME` loads adapters/NAME.gguf."""

from __future__ import annotations

import filecmp
import logging
import os
import shutil
from pathlib import Path

import msgspec

from edgeinfer.errors import ConversionError, InvalidGgufError, UsageError
from edgeinfer.models import gguf, names, sources
from edgeinfer.models.catalog import load_catalog
from edgeinfer.models.converting.checkpoint_files import ADAPTER_CONFIG
from edgeinfer.models.fetching.fetch import not_an_adapter_error
from edgeinfer.models.names import Reference
from edgeinfer.models.progress import FETCHED_IS_KEPT, Job, OnProgress
from edgeinfer.models.pull import PullOptions, fetch_first_working
from edgeinfer.models.pull_plan import plan_pull
from edgeinfer.models.reference import resolve
from edgeinfer.models.store import locked_work_folder
from edgeinfer.platform import paths
from edgeinfer.platform.disk import sync

_log = logging.getLogger("edgeinfer.models")


class PulledAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """A stored LoRA adapter, which changes `n_tensors` tensors of the model `base`."""

    name: str
    path: str
    base: str
    size_bytes: int
    n_tensors: int


def adapter_path(name: str) -> Path:
    """Return the path that the adapter `name` has or would have. Raises UsageError for a bad name."""
    return paths.adapters_dir() / f"{names.model_name(name)}.gguf"


def list_adapters() -> list[PulledAdapter]:
    """List the stored adapters in order of name; skip damaged ones with a warning."""
    adapters = []
    for path in sorted(paths.adapters_dir().glob("*.gguf")):
        try:
            adapters.append(_describe(path))
        except InvalidGgufError as error:
            _log.warning("skipped the adapter %s: %s", path.stem, error.message)
    return adapters


def _describe(path: Path) -> PulledAdapter:
    header = gguf.read_header(path)
    return PulledAdapter(
        name=path.stem,
        path=str(path),
        base=header.text("general.base_model.0.name"),
        size_bytes=path.stat().st_size,
        n_tensors=len(header.tensors) // 2,
    )


def is_adapter(text: str) -> bool:
    """Return whether `text` is the path of a PEFT adapter's folder."""
    return paths.is_model_path(text) and (Path(text).expanduser() / ADAPTER_CONFIG).is_file()


def pull_adapter(
    text: str, base: str, progress: OnProgress | None = None, options: PullOptions | None = None
) -> PulledAdapter:
    """Fetch the PEFT adapter `text` (a folder or a source), convert it for the model `base`, store it.

    The adapter is stored as `options.name`; None makes a name from `text`. Raises UsageError if `text`
    is not an adapter, or if a different adapter has that name and `options.again` is False;
    ConversionError if the adapter cannot be converted for `base`; and the errors of `pull` and
    `ModelRef.files`.
    """
    from edgeinfer.models.converting.fetched import link_files
    from edgeinfer.models.converting.lora import convert_adapter  # slow import: 150 ms

    options = options or PullOptions()
    if not paths.is_model_path(text) and resolve(text).kind in ("pulled", "external"):
        raise not_an_adapter_error(text)
    base_files = resolve(base).files().paths
    if len(base_files) > 1:
        problem = f"{base} has {len(base_files)} files; an adapter's base model must be one file"
        hint = "name another quantization of the base model: `--base MODEL:TYPE`"
        raise ConversionError(problem, hint=hint)
    header = gguf.read_model_header(base_files[0])
    plan = plan_pull(text, load_catalog(), options.name)
    plan = msgspec.structs.replace(plan, is_adapter=True)
    planned = plan.ref.name
    source = plan.candidates[0][0]
    if isinstance(source, sources.HubQuant):  # an adapter's name has no `:TYPE`
        planned = source.repo.replace("/", ".").lower()
    ref = Reference(names.model_name(options.name or planned))
    job = Job(progress, None, options.retry_policy)
    with locked_work_folder(ref, FETCHED_IS_KEPT, ".adapter") as work:
        paths.private_dir(paths.adapters_dir())
        fetched, _ = fetch_first_working(plan, work, job, options)
        target = work / "adapter.gguf.part"
        first = fetched[0].path
        folder = first if first.is_dir() else link_files(fetched, work / "adapter")
        convert_adapter(folder, header, base, target)
        sync(target)
        path = adapter_path(ref.name)
        if path.exists() and not (options.again or filecmp.cmp(target, path, shallow=False)):
            target.unlink()
            problem = f"a different adapter called {ref.name} is here already"
            hint = "choose another name (`--name NAME`), or replace that adapter (`--again`)"
            raise UsageError(problem, hint=hint)
        os.replace(target, path)
        shutil.rmtree(work, ignore_errors=True)
    return _describe(path)
