"""`edgeinfer bundle`: the shipped file again, with a pulled model inside."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import ClassVar

from edgeinfer.catalog import store
from edgeinfer.catalog.models import load_catalog
from edgeinfer.catalog.progress.bar import progress_on
from edgeinfer.catalog.progress.job import Job
from edgeinfer.errors import ShippingError, UsageError
from edgeinfer.host import Host
from edgeinfer.result import Result
from edgeinfer.shipping import bundle as bundles
from edgeinfer.shipping import payload, shipped
from edgeinfer.units import format_bytes


class BundleResult(Result, frozen=True, kw_only=True):
    """The file that was written."""

    kind: ClassVar[str] = "bundle"

    file: str
    model: str
    size_bytes: int

    def human(self) -> str:
        size = format_bytes(self.size_bytes)
        return f"{self.file}: {size}, with {self.model} inside; copied anywhere, it needs no network"


def bundle(options: argparse.Namespace, host: Host) -> BundleResult:
    """Raises ShippingError, ModelNotPulledError, DiskFullError, ChecksumError."""
    program = Path(options.binary) if options.binary else shipped.program_file()
    if program is None:
        raise ShippingError(
            "a bundle is made from the shipped file, and this is not one",
            hint="name one: `--binary FILE`",
        )
    name = options.model or host.config.default_model
    store.model_files(name)  # says what is wrong with it, if anything is
    catalog = load_catalog()
    record = store.find_pulled(name, catalog)
    if record is None:
        raise UsageError(
            f"{name} is a file, not a pulled model",
            hint=f"pull it first: `edgeinfer pull {name} --name NAME`",
        )
    out = Path(options.output)
    if out.exists() and out.samefile(program):
        raise UsageError(f"{out} is the program itself", hint="give another name: `-o FILE`")
    with progress_on(quiet=options.quiet) as report:
        job = Job(report)
        job.begin("copying", out.name, total=record.size_bytes)
        size = bundles.write(payload.open_shipped(program), record, out, job.at)
    return BundleResult(file=str(out), model=record.name, size_bytes=size)
