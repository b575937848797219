"""Whose snapshots are imported: a user's own key, and trusted ones (`platform.ed25519`).

DATA/snapshot-key.pem   the private key, PKCS #8, 0600; made at the first export
DATA/snapshot-signers   0600: a FINGERPRINT whose snapshots are imported, the day it was trusted
"""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from pathlib import Path

from edgeinfer.errors import SnapshotError, SnapshotUnsafeError, SnapshotUntrustedError, UsageError
from edgeinfer.platform import paths
from edgeinfer.platform.disk import write_whole
from edgeinfer.platform.ed25519 import SigningKey, fingerprint, new_key_text, parse_key
from edgeinfer.snapshots.format import refuse_unsafe

PRIVATE_KEY = "snapshot-key.pem"
SIGNERS = "snapshot-signers"
_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")


def own_key(*, make: bool) -> SigningKey | None:
    """Return this user's key; make it if there is none and `make`.

    Raises SnapshotUnsafeError when others can read it, SnapshotUntrustedError when it is no key.
    """
    path = paths.data_dir() / PRIVATE_KEY
    text = read_private(path)
    if text is None and not make:
        return None
    if text is None:
        text = new_key_text()
        write_private(path, text)
    key = parse_key(text)
    if key is None:
        raise SnapshotUntrustedError(
            f"{path} is no Ed25519 key", hint="move it aside; the next export makes another"
        )
    return key


def read_private(path: Path) -> str | None:
    """Read a file of this user's alone, None if there is none. Raises SnapshotUnsafeError."""
    if not os.path.lexists(path):
        return None
    try:
        refuse_unsafe(str(path), directory=False)
    except SnapshotUnsafeError as error:
        raise SnapshotUnsafeError(error.message, hint=error.hint or f"move {path} aside") from error
    return path.read_text("utf-8", errors="replace")


def write_private(path: Path, text: str) -> None:
    """Write a file that this user alone may read. Raises SnapshotError where this user may not."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode(), 0o600)
    except PermissionError as error:
        raise SnapshotError(
            f"{path} cannot be written: {error.strerror}", hint="run `edgeinfer doctor`"
        ) from error


def _signers_file() -> Path:
    return paths.data_dir() / SIGNERS


def trusted() -> dict[str, str]:
    """Return every trusted fingerprint with its day. Raises SnapshotUnsafeError."""
    rows = (line.split() for line in (read_private(_signers_file()) or "").splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2}


def trust(fingerprint: str) -> None:
    """Trust what this key signs. Raises UsageError for no fingerprint."""
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise UsageError(
            f"{fingerprint!r} is no fingerprint of a key",
            hint="`edgeinfer snapshots trust` says yours; one looks like SHA256: and 43 characters",
        )
    today = datetime.now(UTC).date().isoformat()
    _write_signers({fingerprint: today} | trusted())


def distrust(fingerprint: str) -> None:
    """Stop trusting this key. Raises UsageError if it was not trusted."""
    known = trusted()
    if known.pop(fingerprint, None) is None:
        raise UsageError(
            f"{fingerprint} is not among the trusted keys",
            hint="`edgeinfer snapshots trust` lists them",
        )
    _write_signers(known)


def _write_signers(signers: dict[str, str]) -> None:
    write_private(_signers_file(), "".join(f"{who} {day}\n" for who, day in signers.items()))


def refuse_unknown(public: bytes) -> str:
    """Return the fingerprint of a trusted or own key. Raises SnapshotUntrustedError for any other."""
    who = fingerprint(public)
    own = own_key(make=False)
    if who not in trusted() and (own is None or own.fingerprint != who):
        raise SnapshotUntrustedError(
            f"the snapshot was signed by {who}, whom you have not trusted",
            hint="ask its maker for the fingerprint; if it is the same: "
            f"`edgeinfer snapshots trust {who}`",
        )
    return who
