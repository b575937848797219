"""Install the library of a GPU backend from the newest release, and remove it.

The library's JSON file in DATA/backends is written last: the engine opens no library without one.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from edgeinfer.errors import ShippingError, SnapshotUnsafeError, UsageError
from edgeinfer.models.progress import Job
from edgeinfer.platform import disk, paths
from edgeinfer.runtime.llama import backend_loading, backends
from edgeinfer.shipping import update
from edgeinfer.snapshot_format.storage import refuse_unsafe_ancestors

_DRIVER_HINT = "install the driver of the GPU's maker, then run the command again"


def install(name: str, channel: update.Channel, job: Job) -> str:
    """Install the newest release's library of the GPU backend `name`, e.g. "cuda".

    Returns a sentence for the user: "cuda is installed", or "cuda was here already". Raises
    ShippingError if the machine has no driver, if other users can change the folder, or if the release
    has no library for this build of llama.cpp; also DownloadError, ChecksumError,
    ReleaseUntrustedError, DiskFullError. An error leaves an installed library unchanged; if only the
    JSON file could not be written, the engine does not use the library until the next install.
    """
    if driver := backends.driver_problem():
        raise ShippingError(f"nothing was installed: {driver.reason}", hint=driver.fix or _DRIVER_HINT)
    build, library = backend_loading.this_build(), backends.added_dir() / backends.file_name(name)
    hint = f"remove or rename a file or folder that is in the way: {library.parent}"
    with update.locked() as folder, disk.path_errors(library, hint, ShippingError):
        paths.make_folder(library.parent)
        try:
            refuse_unsafe_ancestors(str(library))
        except SnapshotUnsafeError as error:
            message = f"nothing was installed: {error.message}"
            raise ShippingError(message, hint=error.hint) from error
        release = update.newest(channel, folder)
        offered = [b for b in release.backends if b.facts.name == name]
        offered = [b for b in offered if b.facts.build.machine == build.machine]
        if not offered:
            raise ShippingError(
                f"the release {release.version} has no {name} library for {build.machine}",
                hint="use the Vulkan backend with the GPU driver of your distribution",
            )
        fitting = [b for b in offered if b.facts.build.fits(build)]
        if not fitting:
            required = offered[0].facts.build
            raise ShippingError(
                f"the {name} library of release {release.version} is for {required}; this is {build}",
                hint="run `edgeinfer update`, then install the library again",
            )
        file = fitting[0]
        facts = msgspec.structs.replace(file.facts, sha256=file.sha256, size_bytes=file.size_bytes)
        same_size = library.is_file() and library.stat().st_size == file.size_bytes
        is_new = not same_size or disk.sha256_of(library) != file.sha256
        if is_new:
            update.place_verified(file, channel.url, library.parent, library, job)
        disk.write_durably(backends.facts_path(library), msgspec.json.encode(facts), 0o644)
        for leftover in _leftovers(library):
            leftover.unlink(missing_ok=True)
    return f"{name} is installed" if is_new else f"{name} was here already"


def remove(name: str) -> None:
    """Delete the library that `install` has added, its JSON file, and its unfinished downloads.

    Raises UsageError if there is none of them.
    """
    library = backends.added_dir() / backends.file_name(name)
    file_names = (library.name, backends.facts_path(library).name)
    with update.locked():
        files = [*update.list_files(library.parent, *file_names), *_leftovers(library)]
        if not files:
            raise UsageError(
                f"no {name} library was added", hint="`edgeinfer backend` shows the installed ones"
            )
        for file in files:
            file.unlink(missing_ok=True)


def _leftovers(library: Path) -> list[Path]:
    """List the files next to `library` that unfinished downloads and killed processes have left."""
    return update.list_files(library.parent, f"{library.stem}*.part*", f".{library.stem}.*.new")
