"""Take a snapshot of a running process: load what it has loaded once more, and dump that process.

The running one is neither stopped nor read: its description says what there is to load, and nothing of
a user is in what never saw one. What that costs beside a dump of the process itself is in
docs/decisions/091-a-snapshot-of-a-running-service.md.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from edgeinfer.config.config_file import SnapshotsConfig
from edgeinfer.config.load_options import differing, snapshot_options
from edgeinfer.errors import EdgeInferError, SnapshotStaleError
from edgeinfer.platform import paths, process
from edgeinfer.platform.disk import locked
from edgeinfer.snapshots import fingerprint, format, registry
from edgeinfer.snapshots.build import jobs
from edgeinfer.snapshots.process_description import Description, stamps_of
from edgeinfer.snapshots.registry import Details


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """The snapshot; `was_built`: it was not there already, with nothing changed since."""

    snapshot: Details
    was_built: bool


def take(
    found: Description, given_name: str, config: SnapshotsConfig, progress: jobs.Progress
) -> Taken:
    """Build the snapshot of `found`, under the name it was resumed from unless one is given.

    It runs at the lowest niceness, one at a time. Raises SnapshotStaleError when a file is another than
    the one that was loaded, and what `build_order.build` raises.
    """
    process.step_back()
    lock = paths.private_dir(paths.state_dir()) / jobs.BACKGROUND_LOCK
    with locked(lock, lambda: progress("wait for another build", None)):
        _refuse_changed(found)
        order = jobs.Order(
            model=found.model,
            files=found.files,
            options=found.options,
            system=found.system,
            given_name=given_name or found.given_name,
            became=found.became,
            adapters=found.adapters,
            stamps=found.stamps,
        )
        there = _already_there(order)
        if there is not None:
            return Taken(snapshot=there, was_built=False)
        return Taken(snapshot=jobs.build(order, config, progress), was_built=True)


def _refuse_changed(found: Description) -> None:
    now = stamps_of(found.files, found.options)
    for path, before in found.stamps.items():
        if now.get(path) != before:
            raise SnapshotStaleError(
                f"{path} {'was changed' if path in now else 'is gone'} since it was loaded: a snapshot "
                "would be of another model than the one that runs",
                key=path,
                hint=f"start the process again, or `edgeinfer warm {found.model}` for the file that is "
                "there",
            )


def _already_there(order: jobs.Order) -> Details | None:
    """The snapshot of that name, where it is good and was built of the same with the same choices."""
    root = str(paths.snapshots_dir())
    folders = format.generations(root, fingerprint.program_tag()).get(order.name)
    if not folders:
        return None
    try:
        details = registry.read_details(Path(folders[0]))
    except EdgeInferError:
        return None
    wanted = snapshot_options(order.as_loaded)
    is_same = details.depends_on == order.depends_on and not differing(
        wanted, details.requested, details.actual
    )
    return details if is_same and registry.state_of(Path(folders[0]))[0] else None
