"""What `edgeinfer update` reads of a release, and whose word it takes.

    URL/release.json        `Release` in JSON
    URL/release.json.sig    its Ed25519 signature, 64 bytes, by a key that this program carries
    URL/NAME                the shipped file of a machine

`edgeinfer/data/release.toml` holds URL and keys. It is empty in a checkout: only the releases'
publisher fills it in.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated

import msgspec
from msgspec import Meta

from edgeinfer.errors import ReleaseUntrustedError, ShippingError
from edgeinfer.platform.ed25519 import is_signed_by

MANIFEST = "release.json"
SIGNATURE = ".sig"
#: A manifest is smaller.
MOST_BYTES = 64 << 10


class ReleasedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A shipped file beside the manifest."""

    name: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,80}\Z")]
    size_bytes: Annotated[int, Meta(ge=1, le=64 << 30)]
    sha256: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class Release(msgspec.Struct, frozen=True, kw_only=True, tag="edgeinfer-release/1", tag_field="schema"):
    """A version, its files by machine (`uname -m`), and when this was said and until when it holds.

    `issued_s` and `expires_s` are Unix time. A manifest issued before one that was seen is refused.
    """

    version: Annotated[str, Meta(pattern=r"\A\d{1,6}\.\d{1,6}\.\d{1,6}\Z")]
    issued_s: Annotated[int, Meta(ge=1)]
    expires_s: int
    files: dict[str, ReleasedFile]


class Channel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where releases lie, and the public keys (64 hexadecimal digits) that may sign them."""

    url: str = ""
    keys: tuple[str, ...] = ()


def channel() -> Channel:
    """Read the channel of this program."""
    raw = files("edgeinfer").joinpath("data/release.toml").read_bytes()
    return msgspec.toml.decode(raw, type=Channel)


def parse_release(raw: bytes, signature: bytes, keys: tuple[str, ...]) -> Release:
    """Parse a manifest once its signature holds. Raises ReleaseUntrustedError, ShippingError."""
    if not any(is_signed_by(bytes.fromhex(key), signature, raw) for key in keys):
        raise ReleaseUntrustedError("the release's manifest is not signed by a key of this program")
    try:
        return msgspec.json.decode(raw, type=Release)
    except msgspec.MsgspecError as error:
        raise ShippingError(
            f"this program cannot read the release's manifest: {error}", hint="install it by hand"
        ) from error


def number(version: str) -> tuple[int, ...]:
    """Return a version as numbers that compare."""
    return tuple(map(int, version.split(".")))
