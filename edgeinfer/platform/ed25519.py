"""Sign and verify with Ed25519 (RFC 8032), using the OpenSSL with which Python is linked.

No package is needed: `libcrypto` is loaded wherever `hashlib` is. `openssl pkey` reads the key files,
and `openssl pkeyutl -verify -rawin` checks the signatures.
"""

from __future__ import annotations

import base64
import binascii
import ctypes
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

from edgeinfer.errors import EdgeInferError

KEY_BYTES = 32
SIGNATURE_BYTES = 64
#: Prefix of a key's bytes in DER form: PKCS #8 for a private key, SubjectPublicKeyInfo for a public one
#: (RFC 8410).
_PKCS8 = bytes.fromhex("302e020100300506032b657004220420")
_SPKI = bytes.fromhex("302a300506032b6570032100")
_BEGIN, _END = "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----"
#: Coordinates y of the public keys of small order (1, 2, 4 or 8), also in non-canonical encodings.
#: Anyone can make signatures that are valid for such a key.
_P = 2**255 - 19
_Y_OF_ORDER_8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
_SMALL_ORDER = {0, 1, _Y_OF_ORDER_8, _P - _Y_OF_ORDER_8, _P - 1, _P, _P + 1}
_EVP_PKEY_ED25519 = 1087
_PRIVATE, _PUBLIC = "EVP_PKEY_new_raw_private_key", "EVP_PKEY_new_raw_public_key"
_NAMES = ("libcrypto.so.3", "libcrypto.so.1.1")
_OTHER_OPENSSL = "use the one-file program, or your distribution's Python"


@cache
def _libcrypto() -> ctypes.CDLL:
    """Return OpenSSL's library. Raises EdgeInferError if Python has OpenSSL built in."""
    for name in _NAMES:
        with suppress(OSError):
            library = ctypes.CDLL(name)
            for maker in (_PRIVATE, _PUBLIC, "EVP_MD_CTX_new"):
                getattr(library, maker).restype = ctypes.c_void_p
            return library
    problem = "this Python has a built-in OpenSSL that other code cannot use for signatures"
    raise EdgeInferError(problem, hint=_OTHER_OPENSSL)


def fingerprint(public: bytes) -> str:
    """Return a public key's fingerprint: `SHA256:` and the base64 SHA-256 of its DER form."""
    digest = hashlib.sha256(_SPKI + public).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


@contextmanager
def _key(maker: str, raw: bytes) -> Iterator[ctypes.c_void_p]:
    crypto = _libcrypto()
    key = getattr(crypto, maker)(_EVP_PKEY_ED25519, None, raw, ctypes.c_size_t(KEY_BYTES))
    if not key:
        problem = "this OpenSSL refuses Ed25519 keys, for example because it is in FIPS mode"
        raise EdgeInferError(problem, hint=_OTHER_OPENSSL)
    try:
        yield ctypes.c_void_p(key)
    finally:
        crypto.EVP_PKEY_free(ctypes.c_void_p(key))


@contextmanager
def _context() -> Iterator[ctypes.c_void_p]:
    crypto = _libcrypto()
    context = ctypes.c_void_p(crypto.EVP_MD_CTX_new())
    try:
        yield context
    finally:
        crypto.EVP_MD_CTX_free(context)


class SigningKey:
    """A private key, made from its 32 bytes. `public` is the public key (32 bytes)."""

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
        """Return the signature of a message (64 bytes). Raises EdgeInferError if OpenSSL fails."""
        crypto, length = _libcrypto(), ctypes.c_size_t(len(message))
        signature = ctypes.create_string_buffer(SIGNATURE_BYTES)
        size = ctypes.c_size_t(SIGNATURE_BYTES)
        with _key(_PRIVATE, self._seed) as key, _context() as context:
            done = crypto.EVP_DigestSignInit(context, None, None, None, key) == 1 and (
                crypto.EVP_DigestSign(context, signature, ctypes.byref(size), message, length) == 1
            )
        if not done or size.value != SIGNATURE_BYTES:
            problem = "this OpenSSL could not sign with an Ed25519 key"
            raise EdgeInferError(problem, hint=_OTHER_OPENSSL)
        return signature.raw


def is_signed_by(public: bytes, signature: bytes, message: bytes) -> bool:
    """Return whether `signature` of `message` is valid for the public key.

    False for wrong lengths, and for keys of small order.
    """
    if len(public) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    if int.from_bytes(public, "little") % 2**255 in _SMALL_ORDER:
        return False
    crypto, length = _libcrypto(), ctypes.c_size_t(len(message))
    size = ctypes.c_size_t(SIGNATURE_BYTES)
    with _key(_PUBLIC, public) as key, _context() as context:
        return bool(
            crypto.EVP_DigestVerifyInit(context, None, None, None, key) == 1
            and crypto.EVP_DigestVerify(context, signature, size, message, length) == 1
        )


def new_key_text() -> str:
    """Make a private key; return it as the text of a PEM file."""
    body = base64.b64encode(_PKCS8 + os.urandom(KEY_BYTES)).decode()
    return f"{_BEGIN}\n{body}\n{_END}\n"


def parse_key(text: str) -> SigningKey | None:
    """Return the private key in the text of a PEM file; None if the text is no Ed25519 key."""
    body = "".join(text.split())
    body = body.removeprefix("".join(_BEGIN.split())).removesuffix("".join(_END.split()))
    try:
        der = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        der = b""
    if not der.startswith(_PKCS8) or len(der) != len(_PKCS8) + KEY_BYTES:
        return None
    return SigningKey(der.removeprefix(_PKCS8))
