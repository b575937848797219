"""Build a snapshot in the background: one that would have served a cold launch, or one that is ordered.

`python -m edgeinfer.snapshots.build.background MODEL OPTIONS`, started by the launcher when
its app has ended, so a foreground that is still there is somebody else's; without words, of the order
on stdin (`order`). It runs as idle-class work: any other process of the machine goes first. What it
did, or why it did nothing, goes to one line of `auto-warm.log` in the state directory.
"""

from __future__ import annotations

import os
import sys
import time

import msgspec

from edgeinfer.config import load_options
from edgeinfer.config.config_file import Config
from edgeinfer.errors import EdgeInferError
from edgeinfer.host import Host
from edgeinfer.launcher import process_env, selection
from edgeinfer.models import store
from edgeinfer.platform import paths
from edgeinfer.platform.disk import locked
from edgeinfer.runtime.options import LoadOptions
from edgeinfer.snapshots import build_log, criu, failures
from edgeinfer.snapshots.build import jobs
from edgeinfer.units import format_bytes


def reason_not_to(config: Config, order: jobs.Order, asked: LoadOptions) -> str:
    """Why no snapshot should be built now for a launch that `asked` for these options, or ""."""
    if not config.snapshots.auto_warm:
        return "switched off (snapshots.auto-warm)"
    found = criu.probe()
    if found.tier is None:
        return found.reason
    if jobs.is_building(order.name):
        return "another process is building it"
    failed = failures.find(order.name)
    if failed is not None and failed.depends_on == order.depends_on:
        return f"it failed before, and nothing has changed since: {failed.message}"
    try:
        selection.find(order.model, load_options.snapshot_options(asked))
    except EdgeInferError:
        return ""
    return "it is already built"


def build(model: str, options: LoadOptions) -> str:
    """Build it if it should be; a sentence about what happened. Raises nothing of ours."""
    host = Host()
    try:
        name = store.full_name(model)
        files = host.files(name, options.draft)
        order = jobs.Order(model=name, files=files, options=options, system=files.system_prompt)
        chosen, _ = jobs.repack_choice(options, files, host.config.snapshots)
        order = msgspec.structs.replace(order, options=chosen)
        why_not = reason_not_to(host.config, order, options)
    except EdgeInferError as error:
        return f"{model}: not built: {error.message}"
    return f"{name}: not built: {why_not}" if why_not else build_ordered(order, host.config)


def build_ordered(order: jobs.Order, config: Config) -> str:
    """Build it whatever there is; a sentence about what happened. Raises nothing of ours."""
    began = time.monotonic()
    try:
        details = jobs.build(order, config.snapshots, lambda _stage, _fraction: None)
    except EdgeInferError as error:
        return f"{order.name}: not built: {error.message}"
    took = f"{time.monotonic() - began:.1f} s"
    return f"{details.name}: built in {took}, {format_bytes(details.disk_bytes)} on disk"


def order(wanted: jobs.Order) -> None:
    """Have this built by a process that outlives this one. Raises OSError."""
    descriptor = os.memfd_create("order")  # a system prompt may be longer than an argument
    with open(descriptor, "wb", buffering=0) as file:
        file.write(msgspec.json.encode(wanted))
        file.seek(0)
        process_env.detach(__name__, stdin=descriptor)


def main() -> None:
    """The background process; one at a time."""
    jobs.step_back()
    with locked(paths.private_dir(paths.state_dir()) / jobs.BACKGROUND_LOCK):
        if len(sys.argv) > 1:
            said = build(sys.argv[1], msgspec.json.decode(sys.argv[2], type=LoadOptions))
        else:
            ordered = msgspec.json.decode(sys.stdin.buffer.read(), type=jobs.Order)
            said = build_ordered(ordered, Host().config)
        build_log.add(said)


if __name__ == "__main__":
    main()
