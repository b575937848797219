"""Ed25519 (RFC 8032) by the OpenSSL that Python is linked with: a user's own key, and trusted ones.

    DATA/snapshot-key.pem   the private key, PKCS #8, 0600; made at the first export
    DATA/snapshot-signers   0600: a FINGERPRINT whose snapshots are imported, the day it was trusted

No package is needed for it: `libcrypto` is loaded wherever `hashlib` is. Keys are files that `openssl
pkey` reads, signatures what `openssl pkeyutl -verify -rawin` checks.
"""

from __future__ import annotations

import base64
import binascii
import ctypes
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from edgeinfer.errors import SnapshotError, SnapshotUnsafeError, SnapshotUntrustedError, UsageError
from edgeinfer.platform import paths
from edgeinfer.platform.disk import write_whole
from edgeinfer.snapshots.format import refuse_unsafe

PRIVATE_KEY = "snapshot-key.pem"
SIGNERS = "snapshot-signers"
_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")
KEY_BYTES = 32
SIGNATURE_BYTES = 64
#: What stands before a key's bytes in DER: PKCS #8 and SubjectPublicKeyInfo (RFC 8410).
_PKCS8 = bytes.fromhex("302e020100300506032b657004220420")
_SPKI = bytes.fromhex("302a300506032b6570032100")
_BEGIN, _END = "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----"
_EVP_PKEY_ED25519 = 1087
_PRIVATE, _PUBLIC = "EVP_PKEY_new_raw_private_key", "EVP_PKEY_new_raw_public_key"
_NAMES = ("libcrypto.so.3", "libcrypto.so.1.1")

_loaded: list[ctypes.CDLL] = []


def _libcrypto() -> ctypes.CDLL:
    """Open the library that `hashlib` has loaded. Raises SnapshotError where it is not to be had."""
    for name in () if _loaded else _NAMES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        for maker in (_PRIVATE, _PUBLIC, "EVP_MD_CTX_new"):
            getattr(library, maker).restype = ctypes.c_void_p
        _loaded.append(library)
        break
    if not _loaded:
        raise SnapshotError(
            "this Python has an OpenSSL of its own inside, which cannot sign for others",
            hint="use the shipped file, or your distribution's Python",
        )
    return _loaded[0]


def fingerprint(public: bytes) -> str:
    """Return a public key's name: `SHA256:` and the base64 digest of its DER form."""
    digest = hashlib.sha256(_SPKI + public).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


@contextmanager
def _key(maker: str, raw: bytes) -> Iterator[ctypes.c_void_p]:
    """Yield OpenSSL's key of these bytes."""
    crypto = _libcrypto()
    made = getattr(crypto, maker)(_EVP_PKEY_ED25519, None, raw, ctypes.c_size_t(KEY_BYTES))
    if not made:
        raise SnapshotError("OpenSSL knows no such Ed25519 key")
    try:
        yield ctypes.c_void_p(made)
    finally:
        crypto.EVP_PKEY_free(ctypes.c_void_p(made))


@contextmanager
def _context() -> Iterator[ctypes.c_void_p]:
    crypto = _libcrypto()
    context = ctypes.c_void_p(crypto.EVP_MD_CTX_new())
    try:
        yield context
    finally:
        crypto.EVP_MD_CTX_free(context)


class SigningKey:
    """A private key of 32 bytes."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        public, size = ctypes.create_string_buffer(KEY_BYTES), ctypes.c_size_t(KEY_BYTES)
        with _key(_PRIVATE, seed) as key:
            _libcrypto().EVP_PKEY_get_raw_public_key(key, public, ctypes.byref(size))
        self.public = public.raw

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.public)

    def sign(self, message: bytes) -> bytes:
        """Sign a message; return 64 bytes."""
        crypto, length = _libcrypto(), ctypes.c_size_t(len(message))
        signature = ctypes.create_string_buffer(SIGNATURE_BYTES)
        size = ctypes.c_size_t(SIGNATURE_BYTES)
        with _key(_PRIVATE, self._seed) as key, _context() as context:
            done = crypto.EVP_DigestSignInit(context, None, None, None, key) == 1 and (
                crypto.EVP_DigestSign(context, signature, ctypes.byref(size), message, length) == 1
            )
        if not done or size.value != SIGNATURE_BYTES:
            raise SnapshotError("OpenSSL could not sign")
        return signature.raw


def is_signed_by(public: bytes, signature: bytes, message: bytes) -> bool:
    if len(public) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    crypto, length = _libcrypto(), ctypes.c_size_t(len(message))
    size = ctypes.c_size_t(SIGNATURE_BYTES)
    with _key(_PUBLIC, public) as key, _context() as context:
        return bool(
            crypto.EVP_DigestVerifyInit(context, None, None, None, key) == 1
            and crypto.EVP_DigestVerify(context, signature, size, message, length) == 1
        )


def own_key(*, make: bool) -> SigningKey | None:
    """Return this user's key; make it if there is none and `make`.

    Raises SnapshotUnsafeError when others can read it, SnapshotUntrustedError when it is no key.
    """
    path = paths.data_dir() / PRIVATE_KEY
    text = read_private(path)
    if text is None and not make:
        return None
    if text is None:
        body = base64.b64encode(_PKCS8 + os.urandom(KEY_BYTES)).decode()
        text = f"{_BEGIN}\n{body}\n{_END}\n"
        write_private(path, text)
    return SigningKey(_seed(text, path))


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


def _seed(text: str, path: Path) -> bytes:
    body = (
        "".join(text.split()).removeprefix("".join(_BEGIN.split())).removesuffix("".join(_END.split()))
    )
    try:
        der = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        der = b""
    if not der.startswith(_PKCS8) or len(der) != len(_PKCS8) + KEY_BYTES:
        raise SnapshotUntrustedError(
            f"{path} is no Ed25519 key", hint="move it aside; the next export makes another"
        )
    return der.removeprefix(_PKCS8)


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
