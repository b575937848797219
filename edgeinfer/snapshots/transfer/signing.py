"""The keys that sign and verify exported snapshots: this user's own key, and the trusted keys.

DATA/snapshot-key.pem   the private key, PKCS #8, 0600; made at the first export
DATA/snapshot-signers   0600: a line per trusted key: FINGERPRINT, and the day it was trusted
"""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime

from edgeinfer.errors import SnapshotError, SnapshotUntrustedError, UsageError
from edgeinfer.platform import paths
from edgeinfer.platform.disk import write_durably
from edgeinfer.platform.ed25519 import SigningKey, fingerprint, new_key_text, parse_key

PRIVATE_KEY = "snapshot-key.pem"
SIGNERS = "snapshot-signers"


def own_key(*, make: bool) -> SigningKey | None:
    """Return this user's private key. If it is missing, create it (`make`) or return None.

    Raises SnapshotUnsafeError if other users can read the key's file, SnapshotUntrustedError if the
    file has no valid key.
    """
    text = _read_private(PRIVATE_KEY)
    if not text:
        if not make:
            return None
        text = new_key_text()
        _write_private(PRIVATE_KEY, text)
    key = parse_key(text)
    if key is None:
        problem = f"{paths.data_dir() / PRIVATE_KEY} is not an Ed25519 key"
        raise SnapshotUntrustedError(problem, hint="rename the file; the next export creates a key")
    return key


def _read_private(name: str) -> str:
    """Read a private file in the data directory; "" if it is missing. Raises SnapshotUnsafeError."""
    path = paths.data_dir() / name
    if not os.path.lexists(path):
        return ""
    paths.refuse_unsafe(str(path), directory=False)
    return path.read_text("utf-8", errors="replace")


def _write_private(name: str, text: str) -> None:
    path = paths.data_dir() / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, text.encode(), 0o600)
    except PermissionError as error:
        problem = f"{path} cannot be written: {error.strerror}"
        raise SnapshotError(problem, hint="run `edgeinfer doctor`") from error


def trusted_keys() -> dict[str, str]:
    """Return the trusted keys: fingerprint → day of trust (2026-11-29). Raises SnapshotUnsafeError."""
    rows = (line.split() for line in _read_private(SIGNERS).splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2}


def trust(fingerprint: str) -> None:
    """Trust snapshots signed by this key. Raises UsageError for an invalid fingerprint."""
    if not re.fullmatch(r"SHA256:[A-Za-z0-9+/]{43}", fingerprint):
        hint = "a fingerprint is SHA256: and 43 characters; `edgeinfer snapshots trust` shows yours"
        raise UsageError(f"{fingerprint!r} is not a fingerprint of a key", hint=hint)
    _write_signers({fingerprint: datetime.now(UTC).date().isoformat()} | trusted_keys())


def distrust(fingerprint: str) -> None:
    """Stop trusting a key. Raises UsageError if it was not trusted."""
    signers = trusted_keys()
    if signers.pop(fingerprint, None) is None:
        problem = f"{fingerprint} is not among the trusted keys"
        raise UsageError(problem, hint="`edgeinfer snapshots trust` lists the trusted keys")
    _write_signers(signers)


def _write_signers(signers: dict[str, str]) -> None:
    _write_private(SIGNERS, "".join(f"{signer} {day}\n" for signer, day in signers.items()))


def trusted_fingerprint(public: bytes) -> str:
    """Return the fingerprint of a key. Raises SnapshotUntrustedError unless the user trusts the key.

    The user's own key is trusted.
    """
    signer = fingerprint(public)
    own_signer = own_key(make=False)
    if signer not in trusted_keys() and (own_signer is None or own_signer.fingerprint != signer):
        command = f"`edgeinfer snapshots trust {signer}`"
        hint = f"ask the exporter for the key's fingerprint; if it is the same: {command}"
        problem = f"the snapshot was signed by {signer}, a key that you do not trust"
        raise SnapshotUntrustedError(problem, hint=hint)
    return signer
