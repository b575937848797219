"""Check untrusted names, digests and file names; only this module turns them into paths.

A model's reference is `NAME` or `NAME:QUANT`. Its folder is `name` or `name+quant`: no name has a `+`,
so two references never share a folder. Unsafe names are refused; only names of the user's own files are
sanitized instead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from edgeinfer.errors import UsageError
from edgeinfer.models.gguf import file_type, parse_file_type
from edgeinfer.platform import paths

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,94}[a-z0-9])?")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PART = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")


class Reference(msgspec.Struct, frozen=True):
    """A model's name and quantization ("" for the catalogue's quantization)."""

    name: str
    quant: str = ""

    def __str__(self) -> str:
        return f"{self.name}:{self.quant}" if self.quant else self.name

    @property
    def folder(self) -> str:
        return f"{self.name}+{self.quant.lower()}" if self.quant else self.name


def model_name(text: str) -> str:
    """Check a model's name: 1 to 96 of a-z, digits, `.`, `_`, `-`. Raises UsageError."""
    if not _NAME.fullmatch(text) or ".." in text:
        hint = "a name has up to 96 lower-case letters, digits, '.', '_' and '-'"
        raise UsageError(f"{text!r} is not a model name", hint=hint)
    return text


def parse_reference(text: str) -> Reference:
    """Parse `NAME` or `NAME:QUANT`, in any letter case. Raises UsageError."""
    name, colon, quant = text.partition(":")
    if colon:
        parse_file_type(quant, text)
    return Reference(model_name(name.lower()), quant.upper())


def pulled_folder(ref: Reference) -> Path:
    """Return the folder of a pulled model; it need not exist."""
    return paths.models_dir() / ref.folder


def parse_digest(text: str) -> str:
    """Parse a SHA-256 in hexadecimal, with or without `sha256:`. Raises UsageError."""
    plain = text.lower().removeprefix("sha256:")
    if not _DIGEST.fullmatch(plain):
        raise UsageError(f"{text!r} is not a SHA-256 (64 hexadecimal digits)")
    return plain


def check_file_name(text: str) -> str:
    """Return the last component of `text`. Raises UsageError if it is not a safe file name."""
    name = text.rsplit("/", 1)[-1]
    if not _FILE.fullmatch(name) or ".." in name:
        raise UsageError(f"{name!r} is not a safe file name")
    return name


def sanitize_file_name(text: str) -> str:
    """Make a path's or URL's last component a safe file name. Raises UsageError if none is left."""
    plain = re.sub(r"[^A-Za-z0-9._+-]+", "-", text.rstrip("/").rsplit("/", 1)[-1])
    return check_file_name(re.sub(r"\.{2,}", ".", plain).strip("-._"))


def is_path(text: str) -> bool:
    """Return whether `text` is a file's path: it ends in .gguf, or begins like a path."""
    is_gguf = text.lower().endswith(".gguf") and ":" not in text
    return is_gguf or text.startswith(("/", "./", "../", "~"))


def path_hint(text: str) -> str | None:
    """Return a hint for a file here whose name `is_path` does not recognize, or None."""
    return f"the file in this folder is ./{text}" if Path(text).exists() else None


def quantization_of(path: str) -> str:
    """Return the quantization in a GGUF's file name; "" for none and for `mmproj-` files."""
    name = path.rsplit("/", 1)[-1]
    if not name.lower().endswith(".gguf") or name.lower().startswith("mmproj"):
        return ""
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", name[:-5])
    tail = re.split(r"[.-]", stem)[-1].upper()
    if tail == "MXFP4":
        return "MXFP4_MOE"
    return tail if file_type(tail) is not None else ""


def split_parts(path: Path) -> list[Path]:
    """List all parts of a split GGUF from any part, existing or not; `[path]` for a whole file."""
    siblings = split_names(path.name)
    return [path.with_name(name) for name in siblings] if siblings else [path]


def split_names(file_name: str) -> list[str]:
    """List the names of all parts from one of them, at most 999; [] for another name."""
    match = _PART.fullmatch(file_name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]) <= 999:
        return []
    return [f"{match[1]}-{n:05}-of-{match[3]}.gguf" for n in range(1, int(match[3]) + 1)]


def combined_digest(digests: Sequence[str]) -> str:
    """Return the SHA-256 of a model: its file's or, for several files, of their digests in order."""
    if len(digests) == 1:
        return digests[0]
    import hashlib  # slow import (3 ms), needed only for split models

    return hashlib.sha256("".join(digests).encode()).hexdigest()
