"""Whose snapshots this user imports: a list of keys by fingerprint, one a line, and their own.

DATA/snapshot-signers   0600: FINGERPRINT, the day it was trusted
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

from edgeinfer.errors import SnapshotUntrustedError, UsageError
from edgeinfer.snapshots.transfer import signing
from edgeinfer.system import paths

SIGNERS = "snapshot-signers"
_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")


def _file() -> Path:
    return paths.data_dir() / SIGNERS


def trusted() -> dict[str, str]:
    """Every trusted fingerprint and the day it was trusted. Raises SnapshotUnsafeError."""
    rows = (line.split() for line in (signing.read_private(_file()) or "").splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2}


def trust(fingerprint: str) -> None:
    """Import what this key has signed from now on. Raises UsageError for no fingerprint."""
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise UsageError(
            f"{fingerprint!r} is no fingerprint of a key",
            hint="`edgeinfer snapshots trust` says yours; one looks like SHA256: and 43 characters",
        )
    today = datetime.now(UTC).date().isoformat()
    _write({fingerprint: today} | trusted())


def distrust(fingerprint: str) -> None:
    """Refuse what this key has signed from now on. Raises UsageError when it was not trusted."""
    known = trusted()
    if known.pop(fingerprint, None) is None:
        raise UsageError(
            f"{fingerprint} is not among the trusted keys",
            hint="`edgeinfer snapshots trust` lists them",
        )
    _write(known)


def _write(signers: dict[str, str]) -> None:
    signing.write_private(_file(), "".join(f"{who} {day}\n" for who, day in signers.items()))


def refuse_unknown(public: bytes) -> str:
    """The fingerprint of a trusted key or of one's own. Raises SnapshotUntrustedError for any other."""
    who = signing.fingerprint(public)
    own = signing.own_key(make=False)
    if who not in trusted() and (own is None or own.fingerprint != who):
        raise SnapshotUntrustedError(
            f"the snapshot was signed by {who}, whom you have not trusted; a snapshot is a program",
            hint="ask its maker for the fingerprint; if it is this one: "
            f"`edgeinfer snapshots trust {who}`",
        )
    return who
