"""`edgeinfer pull`: download, verify and store a model or an adapter."""

from __future__ import annotations

import argparse
import os
import sys
from urllib.parse import quote

from edgeinfer.cli.options import add_model, add_quiet
from edgeinfer.cli.parser import add_option
from edgeinfer.cli.result import Result, TimedResult
from edgeinfer.cli.terminal import stoppable
from edgeinfer.errors import ChecksumError, UsageError
from edgeinfer.host import EngineHost
from edgeinfer.models import gguf, names
from edgeinfer.models import pull as catalog_pull
from edgeinfer.models.adapters import PulledAdapter, is_adapter, pull_adapter
from edgeinfer.models.catalog import load_catalog
from edgeinfer.models.external_stores import stores
from edgeinfer.models.fetching import fetch
from edgeinfer.models.progress import FETCHED_IS_KEPT, PullProgress, progress_on
from edgeinfer.models.pull import PullOptions
from edgeinfer.models.reference import resolve
from edgeinfer.models.store import hidden_model_warning
from edgeinfer.platform.paths import is_model_path
from edgeinfer.units import format_bytes

#: Command that is suggested after a pull, by the model's purpose.
_NEXT_COMMANDS = {
    "chat": 'edgeinfer run {} "What is photosynthesis?"',
    "base": 'edgeinfer run {} "The sea is" --raw',
    "code": 'edgeinfer run {} "Write a Python function that reverses a string."',
    "embedding": "edgeinfer serve {}",
    "reranker": "edgeinfer serve {}",
}


class PullResult(TimedResult, frozen=True, kw_only=True):
    """A stored model. If it has several files, `sha256` is the hash of their hashes."""

    name: str
    title: str
    files: tuple[str, ...]
    size_bytes: int
    sha256: str
    quantization: str
    purpose: str
    licence: str
    source: str
    was_here: bool
    no_draft: str = ""

    def human(self) -> str:
        state = "was already here" if self.was_here else "is here"
        digest = f", sha256 {self.sha256[:12]}…" if self.sha256 else ""
        licence = f"; licence {self.licence}" if self.licence else ""
        facts = f"{format_bytes(self.size_bytes)}, {self.quantization}{digest}{licence}"
        command = _NEXT_COMMANDS.get(self.purpose, _NEXT_COMMANDS["chat"]).format(self.name)
        faster = f"\nit would be faster with its draft model: {self.no_draft}" if self.no_draft else ""
        return f"{self.name} {state}: {facts}{faster}\ntry it: {command}"


class PullAdapterResult(Result, frozen=True, kw_only=True):
    adapter: PulledAdapter

    def human(self) -> str:
        adapter = self.adapter
        return (
            f"{adapter.name} is here: an adapter of {adapter.n_tensors} tensors for {adapter.base}, "
            f"{format_bytes(adapter.size_bytes)}\n"
            f'try it: edgeinfer run {adapter.base} "What is photosynthesis?" --lora {adapter.name}'
        )


def _pull_adapter(source: str, options: argparse.Namespace) -> PullAdapterResult:
    if not options.base:
        message = f"{source} is an adapter, but its base model is unknown"
        raise UsageError(message, hint=f"name that model: `edgeinfer pull {source} --base MODEL`")
    if options.quantize or options.in_place:
        flag = "--quantize" if options.quantize else "--in-place"
        problem = f"{flag} is for models: an adapter is stored as a copy in its own precision"
        raise UsageError(problem, hint=f"leave out {flag}, or --base if {source} is a model")
    pull_options = PullOptions(name=options.name, sha256=options.sha256, again=options.again)
    with progress_on(quiet=options.quiet) as report:
        return PullAdapterResult(adapter=pull_adapter(source, options.base, report, pull_options))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    forms = "NAME, NAME:QUANT, OWNER/REPO:QUANT, https://…, s3://…, oci://…, FILE.gguf, or a FOLDER"
    add_model(parser, f"{forms} of safetensors (default: the configured model)")
    parser.add_argument("--name", help="name under which the model is stored")
    add_option(parser, "--base MODEL", "base model of MODEL, which is a PEFT LoRA adapter", default="")
    add_option(parser, "--quantize TYPE", "quantize to TYPE (default: unchanged)", default="")
    add_option(parser, "--sha256 HEX", "expected SHA-256; any other file is refused", default="")
    add_option(parser, "--in-place", "use a local file in place, without a copy")
    add_option(parser, "--again", "fetch the model again, even if it is pulled")
    add_quiet(parser)


def run(options: argparse.Namespace, host: EngineHost) -> Result:
    """Download, verify and store a model. Raises what `models.pull.pull` raises.

    After Ctrl-C, the next pull continues. A model that another program has stored is verified and used
    in place; `--name` makes a copy, and `--again` downloads the model instead.
    """
    source: str = options.model or host.config.default_model
    if options.base or is_adapter(source):
        return _pull_adapter(source, options)
    if options.quantize and options.in_place:
        problem = "--quantize makes a smaller copy, so it cannot be combined with --in-place"
        raise UsageError(problem, hint="leave out one of them")
    anew = options.again or options.name or options.sha256
    if stores.is_name(source) or not (anew or is_model_path(source)):
        external = _check_external(source)
        if external is not None and not options.name:
            if options.sha256 and names.parse_digest(options.sha256) != external.sha256:
                problem = f"{source} has SHA-256 {external.sha256}, not {options.sha256}"
                raise ChecksumError(problem, hint="correct --sha256, or pull another source")
            return external
        if external is not None:
            source = f"file:{quote(external.files[0])}"
    pull_options = PullOptions(
        name=options.name,
        quantize=options.quantize,
        sha256=options.sha256,
        in_place=options.in_place,
        again=options.again,
    )
    fetched = False

    def on_progress(now: PullProgress) -> None:
        nonlocal fetched
        fetched |= now.stage == "done"
        report(now)

    hint = "run the same command again: it continues where it stopped"
    with progress_on(quiet=options.quiet) as report, stoppable(f"stopped; {FETCHED_IS_KEPT}", hint):
        record = catalog_pull.pull(source, on_progress, options=pull_options)
    sys.stderr.write(hidden_model_warning(record))
    entry = load_catalog().get(record.base) or record.entry_by_header()
    if record.in_place and any(map(fetch.writable_by_others, record.paths)):
        sys.stderr.write(
            f"warning: others may change {record.paths[0]} while it is used; a copy is safe from that: "
            f"`edgeinfer pull {source}` without --in-place\n"
        )
    return PullResult(
        name=record.name,
        title=entry.title,
        files=tuple(map(str, record.paths)),
        size_bytes=record.size_bytes,
        sha256=record.sha256,
        quantization=record.quantization,
        purpose=entry.purpose,
        licence=entry.licence,
        source=record.source,
        was_here=not fetched,
        no_draft=resolve(record.name).files().no_draft,
    )


def _check_external(source: str) -> PullResult | None:
    """Verify another program's model; return None if there is none, or the catalogue has the name."""
    ref = resolve(source)
    stored = ref.external
    is_ours = stored is None or stored.problem or names.plain_name(source) in load_catalog()
    if is_ours and not stores.is_name(source):
        return None
    files = ref.files()
    header = gguf.read_model_header(files.paths[0])
    return PullResult(
        name=files.name,
        title=header.label("general.name") or files.name,
        files=files.paths,
        size_bytes=sum(os.path.getsize(path) for path in files.paths),
        sha256=files.sha256,
        quantization=header.quantization,
        purpose=header.purpose,
        licence=header.label("general.license"),
        source=stored.store if stored else "",
        was_here=True,
    )
