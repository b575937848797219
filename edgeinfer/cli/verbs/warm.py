"""`edgeinfer warm`: build a snapshot of a loaded model, from which later launches resume."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import closing
from pathlib import Path

from edgeinfer import typed_options
from edgeinfer.cli.options import SYSTEM, add_attached_options, add_load_options, add_model, add_quiet
from edgeinfer.cli.parser import add_option
from edgeinfer.cli.result import TimedResult
from edgeinfer.cli.terminal import StageProgress, stoppable
from edgeinfer.config.load_options import snapshot_options
from edgeinfer.errors import UsageError
from edgeinfer.host import EngineHost
from edgeinfer.models.reference import resolve
from edgeinfer.runtime.events import Finished
from edgeinfer.runtime.options import LoadOptions
from edgeinfer.safe_text import without_controls
from edgeinfer.snapshot_format import storage
from edgeinfer.snapshots.builder import jobs
from edgeinfer.snapshots.inputs import SnapshotInputs
from edgeinfer.snapshots.registry import Details
from edgeinfer.units import format_bytes


class WarmResult(TimedResult, frozen=True, kw_only=True):
    """A finished snapshot. `waited_s`: time (s) spent waiting for another build of the same snapshot.

    `tool_tokens`: with `--tools`, the number of prefilled tokens of system prompt and tools.
    """

    snapshot: Details
    waited_s: float = 0.0
    tool_tokens: int = 0

    def human(self) -> str:
        d = self.snapshot
        stages = ", ".join(f"{name} {ms / 1000:.1f} s" for name, ms in d.stages_ms.items() if ms >= 50)
        prefilled = f"; system prompt ({d.system_tokens} tokens) prefilled" if d.system_tokens else ""
        waited = f"; waited {self.waited_s:.1f} s for another build of it" if self.waited_s else ""
        if self.tool_tokens:
            prefilled += f"; {self.tool_tokens} tokens with tools prefilled on disk"
        is_named = storage.user_name_of(d.name)
        start = f"\nto start from it: edgeinfer chat --snapshot {d.name}" if is_named else ""
        return (
            f"{d.name} is warm: {format_bytes(d.disk_bytes)} on disk, "
            f"{format_bytes(d.memory_bytes)} of memory{prefilled}\n"
            f"{stages}{waited}; {self.wall_s:.1f} s in all\n"
            f"context {d.actual.get('n_ctx', '?')} tokens, "
            f"{d.actual.get('n_parallel', '?')} sequences at once{start}"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_option(parser, "--system TEXT|@FILE", SYSTEM, default="")
    add_option(parser, "--tools", "prefill the configured tools too, for `--tools`")
    parser.add_argument("--name", default="", help="name of the snapshot")
    add_attached_options(parser)
    add_quiet(parser)
    add_load_options(parser)


def run(options: argparse.Namespace, host: EngineHost) -> WarmResult:
    """Build a snapshot. Raises what `jobs.build` raises, UsageError for a bad prompt or adapter."""
    storage.refuse_bad_name(options.name)
    ref = resolve(options.model or host.config.default_model)
    config = host.config.snapshots
    load_options = typed_options.load_options(options, host.config.load)
    files = host.files(ref, draft=load_options.draft)
    for path in load_options.adapter_paths(files):
        if not os.path.isfile(path):
            hint = "pull it: `edgeinfer pull ADAPTER --base MODEL`"
            raise UsageError(f"the adapter {path} is not a file", hint=hint)
    if options.tools:
        from edgeinfer.tools.loop import require_tools

        require_tools(host.config.tools)
    inputs = SnapshotInputs(
        model=ref.name,
        files=files,
        options=load_options,
        system=typed_options.system_prompt(options.system, host.config) or files.system_prompt,
        given_name=options.name or _own_name(options.system, load_options),
    )
    progress = StageProgress(sys.stderr, quiet=options.quiet)
    with stoppable("stopped; nothing of the snapshot is kept"), progress:
        details = jobs.build(inputs, config, progress.report)
    waited_s = round(progress.seconds.get(jobs.WAITING, 0.0), 3)
    model = options.model or host.config.default_model
    tool_tokens = _prefill_tools(model, inputs, host) if options.tools else 0
    return WarmResult(snapshot=details, tool_tokens=tool_tokens, waited_s=waited_s)


def _prefill_tools(model: str, inputs: SnapshotInputs, host: EngineHost) -> int:
    """Prefill system prompt and tools, to cache them on disk; return the number of tokens."""
    from edgeinfer.tools.loop import ChatTools
    from edgeinfer.tools.prompt_prefix import prefill_request

    with closing(ChatTools(host.config.tools, Path.cwd())) as tools:
        for notice in tools.prepare():
            sys.stderr.write(without_controls(f"tools: {notice}\n"))
        with closing(host.engine(model, inputs.options)) as engine:
            request = prefill_request(engine, tools.request_tools(), inputs.system)
            for event in engine.submit(request):
                if isinstance(event, Finished):
                    return event.usage.prompt_tokens
    return 0


def _own_name(system: str, options: LoadOptions) -> str:
    """Return a snapshot's name made from `system` prompt and options; "" without a prompt."""
    text = f"{system}{snapshot_options(options)}"
    return f"system-{storage.short_hash(text)}" if system else ""
