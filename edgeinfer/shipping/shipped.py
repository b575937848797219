"""Paths of the one-file program and of its unpacked application. Standard library only.

The launcher runs inside the one-file program's own process (build/handover.c), with Python from the
unpacked application; the application proper is `APP/edgeinfer-app`, made by PyInstaller. Both have
`sys.frozen`, and in both `sys.executable` is `APP/edgeinfer-app`, the program that
`edgeinfer.platform.process` starts.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing costs 3 ms, which the launcher would pay
if TYPE_CHECKING:
    from pathlib import Path

#: Environment variable with the path of the one-file program, also in the processes that it starts;
#: not set in a checkout or an installed package.
FILE_VARIABLE = "EDGEINFER_FILE"
#: File name of the program in the unpacked application's folder.
APP_PROGRAM = "edgeinfer-app"
#: Files in which distributions have certificate authorities: Debian, Fedora, openSUSE, Alpine.
_AUTHORITIES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)


_CXX = "libstdc++.so.6"
#: Folders in which distributions have libstdc++: Debian and Ubuntu; Fedora and RHEL; Arch.
_LIBRARIES = (f"/usr/lib/{getattr(sys.implementation, '_multiarch', '')}", "/usr/lib64", "/usr/lib")


def restore_environment() -> None:
    """Undo PyInstaller's changes to the environment, so that child programs do not inherit them.

    This process no longer needs these changes: the dynamic linker has already read `LD_LIBRARY_PATH`.
    """
    before = os.environ.pop("LD_LIBRARY_PATH_ORIG", None)
    for name in list(os.environ):
        if name == "LD_LIBRARY_PATH" or name.startswith("_PYI_"):
            del os.environ[name]
    if before is not None:
        os.environ["LD_LIBRARY_PATH"] = before


def is_shipped() -> bool:
    """Return whether this process runs from the one-file program."""
    return bool(getattr(sys, "frozen", False))


def app_dir() -> Path | None:
    """Return the folder of the unpacked application; None in a checkout or an installed package."""
    from pathlib import Path  # slow import (5 ms): the launcher never calls this

    return Path(sys.executable).parent if is_shipped() else None


def program_file() -> Path | None:
    """Return the running one-file program; None if its file was removed, or in an installed package."""
    from pathlib import Path

    named = os.environ.get(FILE_VARIABLE, "")
    return Path(named) if is_shipped() and named and os.path.isfile(named) else None


def trust_certificates() -> None:
    """Set SSL_CERT_FILE to this system's certificate authorities, or, if it has none, to certifi's.

    Nothing is changed if SSL_CERT_FILE or SSL_CERT_DIR is set. The bundled OpenSSL itself looks only at
    Debian's path.
    """
    if os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR"):
        return
    shipped = f"{os.path.dirname(sys.executable)}/_internal/certifi/cacert.pem"
    authorities = next((path for path in (*_AUTHORITIES, shipped) if os.path.isfile(path)), "")
    if authorities:
        os.environ["SSL_CERT_FILE"] = authorities


def prefer_newer_cxx(folders: tuple[str, ...] = _LIBRARIES) -> str:
    """Load the system's libstdc++ from one of `folders` if it is newer than the bundled one.

    Returns the path of the loaded library; "" if none was loaded. A process has only one libstdc++, and
    a GPU driver may need a newer one than the bundled one; older programs can use a newer one, too.
    """
    own_version = _cxx_version(f"{os.path.dirname(sys.executable)}/_internal")
    newest = max((_cxx_version(folder), folder) for folder in folders)
    if newest[0] <= own_version:
        return ""
    import ctypes  # slow import (2 ms)

    path = f"{newest[1]}/{_CXX}"
    try:
        ctypes.CDLL(path)
    except OSError:  # the library is for another architecture or libc
        return ""
    return path


def _cxx_version(folder: str) -> tuple[int, ...]:
    """Return (6, 0, 33) if the folder's libstdc++.so.6 is a link to libstdc++.so.6.0.33; else ()."""
    try:
        target = os.path.basename(os.readlink(f"{folder}/{_CXX}"))
    except OSError:
        return ()
    numbers = target.removeprefix("libstdc++.so.").split(".")
    return tuple(int(n) for n in numbers) if all(n.isdecimal() for n in numbers) else ()


def start() -> None:
    """Let `sys` and the environment show that this process is the one-file program.

    build/handover.c puts the paths into `sys`, calls this function before other modules are imported,
    and then calls the launcher's main.
    """
    app: str = sys._edgeinfer_app  # type: ignore[attr-defined]
    sys.frozen = True  # type: ignore[attr-defined]
    sys.executable = f"{app}/{APP_PROGRAM}"
    os.environ[FILE_VARIABLE] = sys._edgeinfer_file  # type: ignore[attr-defined]
    model: str = sys._edgeinfer_model  # type: ignore[attr-defined]
    if model:
        from edgeinfer.platform import paths  # `paths` needs the changes of `sys` above

        os.environ[paths.BUNDLED_MODEL] = model.rpartition("-")[0]  # the name without the digest
