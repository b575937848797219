"""`edgeinfer doctor --verify`: compare the unpacked application and its file with what was built."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from edgeinfer.cli.result import Result
from edgeinfer.errors import EdgeInferError, ShippingError
from edgeinfer.shipping import payload, shipped, unpack
from edgeinfer.shipping.payload import Index
from edgeinfer.units import format_bytes


class SelfCheckResult(Result, frozen=True, kw_only=True):
    """What was checked and found. Empty `findings` mean: every byte is what was built."""

    kind: ClassVar[str] = "self-check"

    app: str
    file: str
    files_checked: int
    bytes_checked: int
    findings: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        return 5 if self.findings else 0

    def human(self) -> str:
        what = f"{self.files_checked} files, {format_bytes(self.bytes_checked)} in {self.app}"
        if not self.findings:
            return f"{what}: all as built" + (
                f"\n{self.file}: its payload is as built" if self.file else ""
            )
        return "\n".join(
            [f"{what}:", *self.findings, "", f"remove {self.app} and start again: it is unpacked anew"]
        )


def self_check() -> SelfCheckResult:
    """Raises ShippingError outside the shipped file."""
    app = shipped.app_dir()
    if app is None:
        raise ShippingError(
            "this is not the shipped file", hint="check an installation with `pip check`"
        )
    raw = (app / unpack.INDEX).read_bytes() if (app / unpack.INDEX).is_file() else b""
    index = payload.parse_index(raw)
    if index is None or index.name != app.name:
        wrong = (f"{app / unpack.INDEX}: not the index of {app.name}",)
        return SelfCheckResult(app=str(app), file="", files_checked=0, bytes_checked=0, findings=wrong)
    findings = [*_check_files(app, index), *_strangers(app, index)]
    file = shipped.program_file()
    findings += _check_payload(file, index) if file else []
    return SelfCheckResult(
        app=str(app),
        file=str(file or ""),
        files_checked=len(index.files) + len(index.links),
        bytes_checked=index.size,
        findings=tuple(findings),
    )


def _check_files(app: Path, index: Index) -> Iterator[str]:
    for entry in index.files:
        try:
            data = (app / entry.path).read_bytes()
            mode = os.stat(app / entry.path).st_mode & 0o777
        except OSError as error:
            yield f"{entry.path}: {error.strerror}"
            continue
        if entry.path in index.relocate:
            data = payload.relocated(data, "")
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            yield f"{entry.path}: altered"
        elif mode != entry.mode:
            yield f"{entry.path}: mode {mode:o} instead of {entry.mode:o}"
    for path, target in index.links:
        if not os.path.islink(app / path) or os.readlink(app / path) != target:
            yield f"{path}: not the link it was"


def _strangers(app: Path, index: Index) -> Iterator[str]:
    known = (
        {entry.path for entry in index.files}
        | {path for path, _ in index.links}
        | {unpack.INDEX, unpack.SOURCE}
    )
    for folder, _, names in os.walk(app):
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), app)
            if path not in known:
                yield f"{path}: was not put there by us"


def _check_payload(file: Path, index: Index) -> Iterator[str]:
    """Check the payload block by block, unless the file carries another version by now."""
    try:
        parts = payload.open_shipped(file)
        if parts.app != index.name:
            return
        with file.open("rb") as open_file:
            payload.read_index(open_file, parts)
            for number, block in enumerate(index.blocks):
                raw = payload.block_bytes(open_file.fileno(), parts, block)
                for _ in payload.split_block(raw, [e for e in index.files if e.block == number], file):
                    pass
    except (OSError, EdgeInferError) as error:
        yield str(error)
