"""What a folder or a registry offers: a snapshot described, and signed by somebody who is trusted."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Protocol

import msgspec

from edgeinfer.errors import SnapshotUntrustedError
from edgeinfer.snapshots.transfer import signing
from edgeinfer.snapshots.transfer.description import (
    SIGNATURE,
    SIGNER,
    Description,
    LayerBlob,
    paired,
    read_config,
    read_manifest,
)


class Source(Protocol):
    """Where a snapshot comes from: a folder, or what was fetched of a registry."""

    def manifest(self, name: str = "") -> bytes: ...

    def read(self, digest: str, size: int) -> bytes: ...

    def chunks(self, digest: str, size: int) -> Iterator[bytes]: ...


class Offered(msgspec.Struct, frozen=True):
    """A snapshot that is offered: described, its layers with their blobs, who signed it (trusted)."""

    description: Description
    layers: list[LayerBlob]
    signer: str


def offered(source: Source, name: str = "") -> Offered:
    """What a source offers under a name, signed by somebody whom this user trusts.

    Raises SnapshotCorruptError, SnapshotUntrustedError.
    """
    manifest = read_manifest(source.manifest(name))
    config = source.read(manifest.config.digest, manifest.config.size)
    signer = _signer(manifest.annotations, config)
    description = read_config(config)
    return Offered(description, paired(manifest, description), signer)


def _signer(annotations: dict[str, str], config: bytes) -> str:
    try:
        public = base64.b64decode(annotations[SIGNER], validate=True)
        signature = base64.b64decode(annotations[SIGNATURE], validate=True)
    except (KeyError, binascii.Error, ValueError) as error:
        raise SnapshotUntrustedError(
            "the snapshot is not signed", hint="export it again: `edgeinfer snapshots export`"
        ) from error
    if not signing.is_signed_by(public, signature, config):
        raise SnapshotUntrustedError(
            "the snapshot's signature is not of what it describes: it was altered after it was signed",
            hint="fetch or export it again",
        )
    return signing.refuse_unknown(public)
