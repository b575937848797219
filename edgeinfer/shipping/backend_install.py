"""Install the library of a GPU backend from the newest release, and remove it.

Its JSON file in DATA/backends is written last: a library that it does not describe is not opened.
"""

from __future__ import annotations

import msgspec

from edgeinfer.errors import ShippingError, UsageError
from edgeinfer.models.progress import Job
from edgeinfer.platform import disk
from edgeinfer.runtime.llama import backend_loading, backends
from edgeinfer.shipping import update


def install(name: str, channel: update.Channel, job: Job) -> str:
    """Install the library of the backend `name`; return what was done, in words.

    Raises ShippingError without a driver or a library for this llama.cpp, and DownloadError,
    ChecksumError, ReleaseUntrustedError, DiskFullError. An installed library is unchanged then, but if
    its JSON file cannot be written, the new library is in place and not opened until the next try.
    """
    if problem := backend_loading.driver_problem():
        raise ShippingError(f"nothing was installed: {problem}", hint=backend_loading.DRIVER_FIX)
    build, library = backend_loading.this_build(), backends.added_dir() / backends.file_name(name)
    with update.locked() as folder:
        release = update.newest(channel, folder)
        fitting = [b for b in release.backends if b.facts.name == name and b.facts.build.fits(build)]
        if not fitting:
            message = f"the release {release.version} has no {name} library for {build}"
            raise ShippingError(message, hint="`edgeinfer update` first; on arm64 use Vulkan")
        facts = fitting[0].facts
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_new = not library.is_file() or disk.sha256_of(library) != facts.sha256
        if is_new:
            partial = update.fetch_verified(fitting[0], channel.url, library.parent, job)
            partial.chmod(0o644)
            disk.sync(partial)
            partial.replace(library)
        disk.write_durably(backends.facts_path(library), msgspec.json.encode(facts), 0o644)
        for leftover in library.parent.glob(f"{library.stem}*.part*"):
            leftover.unlink()
    return f"{name} is installed" if is_new else f"{name} was here already"


def remove(name: str) -> None:
    """Remove the added library of the backend `name`, and what was fetched of it. Raises UsageError."""
    library = backends.added_dir() / backends.file_name(name)
    with update.locked():
        paths = [library, backends.facts_path(library), *library.parent.glob(f"{library.stem}*.part*")]
        files = [path for path in paths if path.is_file() or path.is_symlink()]
        if not files:
            raise UsageError(f"no {name} library was added", hint="`edgeinfer backend` lists them")
        for file in files:
            file.unlink()
