"""Check names, digests and file names that come from outside, and turn names into paths.

A model is referred to as `NAME` or `NAME:QUANT`. Its folder is `name` or `name+quant`; no name contains
a `+`, so two references never share a folder. An unsafe name is refused; only the name of a user's own
file is changed to a safe one.
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
    """A model's name, and its quantization in capitals ("" for the catalogue's)."""

    name: str
    quant: str = ""

    def __str__(self) -> str:
        return f"{self.name}:{self.quant}" if self.quant else self.name

    @property
    def folder(self) -> str:
        """Name of the model's folder: `qwen3-4b` or `qwen3-4b+q8_0`."""
        return f"{self.name}+{self.quant.lower()}" if self.quant else self.name


def model_name(text: str) -> str:
    """Return `text` if it is a valid name of a model. Raises UsageError."""
    if not _NAME.fullmatch(text) or ".." in text:
        hint = "a name has up to 96 lower-case letters, digits, '.', '_' and '-'"
        raise UsageError(f"{text!r} is not a model name", hint=hint)
    return text


def plain_name(text: str) -> str:
    """Return a model's name in lower case and without the tag `:latest`, for comparisons."""
    return text.lower().removesuffix(paths.LATEST)


def parse_reference(text: str) -> Reference:
    """Parse `NAME` or `NAME:QUANT` in any letter case. Raises UsageError."""
    name, colon, quant = plain_name(text).partition(":")
    if colon:
        parse_file_type(quant, text)
    return Reference(model_name(name), quant.upper())


def find_reference(text: str) -> Reference | None:
    """Parse like `parse_reference`; return None for a tag that is not a quantization (`qwen3:4b`)."""
    _, colon, tag = plain_name(text).partition(":")
    return None if colon and file_type(tag) is None else parse_reference(text)


def pulled_folder(ref: Reference) -> Path:
    """Return the path of the folder that a pulled model has or would have."""
    return paths.models_dir() / ref.folder


def parse_digest(text: str) -> str:
    """Return 64 hex digits from a SHA-256 with or without `sha256:`. Raises UsageError."""
    plain = text.lower().removeprefix("sha256:")
    if not _DIGEST.fullmatch(plain):
        raise UsageError(f"{text!r} is not a SHA-256", hint="give its 64 hexadecimal digits")
    return plain


def check_file_name(text: str) -> str:
    """Return the last component of a path. Raises UsageError if it is not a safe file name."""
    name = text.rsplit("/", 1)[-1]
    if not _FILE.fullmatch(name) or ".." in name:
        hint = "use up to 200 letters, digits, '.', '_', '+', '-'; the first a letter or digit; no '..'"
        raise UsageError(f"{name!r} is not a safe file name", hint=hint)
    return name


def sanitize_file_name(text: str) -> str:
    """Return a path's or URL's last part as a safe name: `My model` → `My-model`. Raises UsageError."""
    plain = re.sub(r"[^A-Za-z0-9._+-]+", "-", text.rstrip("/").rsplit("/", 1)[-1])
    return check_file_name(re.sub(r"\.{2,}", ".", plain).strip("-._"))


def path_hint(text: str) -> str | None:
    """Return a hint if `text`, which was taken for a name, is a file in this folder; otherwise None."""
    return f"the file in this folder is ./{text}" if Path(text).exists() else None


def quantization_of(path: str) -> str:
    """Return the quantization that a GGUF's file name ends in, "" for none and for projectors."""
    name = path.rsplit("/", 1)[-1]
    if not name.lower().endswith(".gguf") or name.lower().startswith("mmproj"):
        return ""
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", name[:-5])
    tail = re.split(r"[.-]", stem)[-1].upper()
    if tail == "MXFP4":
        return "MXFP4_MOE"
    return tail if file_type(tail) is not None else ""


def split_parts(path: Path) -> list[Path]:
    """Return the paths of all parts of a split model, given any of them; `[path]` for a whole file."""
    siblings = split_names(path.name)
    return [path.with_name(name) for name in siblings] if siblings else [path]


def split_names(file_name: str) -> list[str]:
    """List the file names of all parts of a split model, given any of them; [] for a whole file."""
    match = _PART.fullmatch(file_name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]) <= 999:
        return []
    return [f"{match[1]}-{n:05}-of-{match[3]}.gguf" for n in range(1, int(match[3]) + 1)]


def combined_digest(digests: Sequence[str]) -> str:
    """Return a model's digest: that of its only file, or the SHA-256 of its parts' joined `digests`."""
    if len(digests) == 1:
        return digests[0]
    import hashlib  # slow import (3 ms), needed only for split models

    return hashlib.sha256("".join(digests).encode()).hexdigest()
