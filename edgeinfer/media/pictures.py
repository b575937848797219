"""Read the picture files of messages, decode pictures, and mark their places in the text.

`param`, an argument of the functions, is the request's field that an error names.
"""

from __future__ import annotations

import base64
import re
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from threading import BoundedSemaphore
from typing import Any

from edgeinfer.errors import InvalidRequestError
from edgeinfer.platform.process import child_command

#: First character of both marks below: a noncharacter of Unicode, which a client's text may contain,
#: too.
_MARK = "\ufdd1"
#: Marks the position of a picture in the text `Message.content`.
PICTURE_MARK = f"{_MARK}\ufdd2"
#: Replaces `_MARK` in the texts of a message with pictures, so that no text contains a PICTURE_MARK.
_ESCAPED_MARK = f"{_MARK}\ufdd3"


@dataclass(frozen=True, slots=True)
class Picture:
    """A decoded picture. `rgb` has 8-bit pixels, row by row: `3 * width * height` bytes."""

    width: int
    height: int
    rgb: bytes

    def __post_init__(self) -> None:
        if min(self.width, self.height) < 1 or len(self.rgb) != 3 * self.width * self.height:
            raise ValueError(f"{len(self.rgb)} bytes cannot be a picture of {self.width}x{self.height}")


def join_parts(parts: Iterable[str | bytes]) -> tuple[str, tuple[bytes, ...]]:
    """Return the fields `content` and `pictures` of a Message that has these texts and picture files.

    In `content`, a PICTURE_MARK stands for each picture. If there are pictures, texts are escaped, so
    that a PICTURE_MARK in a text does not stand for a picture.
    """
    parts = list(parts)
    pictures = tuple(piece for piece in parts if isinstance(piece, bytes))
    escaped = _ESCAPED_MARK if pictures else _MARK
    content = (PICTURE_MARK if isinstance(p, bytes) else p.replace(_MARK, escaped) for p in parts)
    return "".join(content), pictures


def split_at_pictures(content: str, pictures: Sequence[bytes]) -> list[str]:
    """Return the texts around the pictures of a message, as they were before `join_parts`."""
    if not pictures:
        return [content]
    return [text.replace(_ESCAPED_MARK, _MARK) for text in content.split(PICTURE_MARK)]


def content_fields(parts: Iterable[str | bytes], between: str = "") -> dict[str, Any]:
    """Return a Message's fields for these texts and picture files; `between` joins adjacent texts."""
    separated: list[str | bytes] = []
    for piece in parts:
        if separated and isinstance(piece, str) and isinstance(separated[-1], str):
            separated.append(between)
        separated.append(piece)
    content, pictures = join_parts(separated)
    return {"content": content, "pictures": pictures}


_HELPER = "edgeinfer.media.picture_decoder_process"
MAX_FILE_BYTES = 32 << 20
#: Time limit (s) of a decoder process, long enough for a busy machine. The process itself limits its
#: CPU time.
_PATIENCE_S = 60.0
_DATA_URI = re.compile(r"data:[\w.+/-]*(;[\w.+-]+=[^;,]*)*;base64,", re.IGNORECASE)
_MAGIC = re.compile(
    rb"(?P<JPEG>\xff\xd8\xff)|(?P<PNG>\x89PNG\r\n\x1a\n)|(?P<GIF>GIF8)|(?P<WEBP>RIFF....WEBP)",
    re.DOTALL,
)
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE)

MAX_PICTURES = 64
#: At most three decoder processes run at a time, because each may take 512 MB.
_decoders = BoundedSemaphore(3)
#: Maximum number of decoder processes of one caller (API key).
_MAX_OF_CALLER = 2
_decoders_of: dict[str, BoundedSemaphore] = {}
#: The caller (API key) whose files this thread decodes. `_MAX_OF_CALLER` does not limit the caller "".
current_caller = ContextVar("current_caller", default="")


def _own_decoders() -> AbstractContextManager[object]:
    caller = current_caller.get()
    if not caller:
        return nullcontext()
    return _decoders_of.setdefault(caller, BoundedSemaphore(_MAX_OF_CALLER))


def format_of(data: bytes) -> str:
    """Return "JPEG", "PNG", "GIF" or "WEBP" by the first bytes of a file; "" for other files."""
    match = _MAGIC.match(data)
    return (match and match.lastgroup) or ""


def is_picture(data: bytes) -> bool:
    """Return whether the first bytes of a file are those of a picture."""
    return bool(format_of(data))


def check_file(data: bytes, param: str = "messages") -> bytes:
    """Return `data` if it is a picture file of allowed size.

    Raises InvalidRequestError for other files; the error names `param`, the field of the request.
    """
    if len(data) > MAX_FILE_BYTES:
        raise _refusal(f"the file has more than {MAX_FILE_BYTES >> 20} MB", param)
    if not is_picture(data):
        raise _refusal("the file is not a JPEG, PNG, WebP or GIF file", param)
    return data


def from_base64(text: str, param: str = "messages") -> bytes:
    """Decode a picture file from base64 or a `data:` URI.

    Raises InvalidRequestError if `text` is not valid base64, or the file is too large or not a picture.
    """
    return check_file(decode_file(text, lambda reason: _refusal(reason, param)), param)


def decode_file(text: str, refusal: Callable[[str], InvalidRequestError]) -> bytes:
    """Decode a file from base64 or a `data:` URI. Raises `refusal(reason)` for other texts."""
    uri = _DATA_URI.match(text)
    if uri is None and (scheme := _SCHEME.match(text)) is not None:
        raise refusal(f"{scheme[1].lower()}: URLs are not fetched")
    encoded = text[uri.end() if uri else 0 :]
    with suppress(ValueError):
        return base64.b64decode(encoded, validate=True)
    # also accept base64 with line breaks, without padding, or with the URL-safe alphabet
    plain = "".join(encoded.split()).rstrip("=")
    plain = plain.replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except ValueError:
        raise refusal("the file is not valid base64") from None


def decode(data: bytes, param: str = "messages") -> Picture:
    """Decode a picture file in a sandboxed process. A photo takes about 0.1 s.

    Raises InvalidRequestError for a file that is broken, too large, or not a picture.
    """
    try:
        head, pixels = run_helper(_HELPER, check_file(data, param), format_of(data))
        width, height = map(int, head.split())
        return Picture(width, height, pixels)
    except ValueError as error:
        raise _refusal(str(error), param) from None


def run_helper(helper: str, data: bytes, *arguments: str) -> tuple[bytes, bytes]:
    """Run a decoder: `python -m helper arguments…` with `data`, a file, on stdin.

    Returns the first line of its output, and all other bytes. Raises ValueError with the reason if the
    decoder cannot read the file or exceeds its limits.
    """
    try:
        with _own_decoders(), _decoders:
            completed = subprocess.run(
                child_command(helper, *arguments),
                input=data,
                capture_output=True,
                timeout=_PATIENCE_S,
                check=False,
            )
    except subprocess.TimeoutExpired:
        raise ValueError(f"decoding the file takes more than {_PATIENCE_S:.0f} s") from None
    head, line_end, output = completed.stdout.partition(b"\n")
    if head.startswith(b"error "):
        raise ValueError(completed.stdout[6:].decode("utf-8", "replace"))
    if completed.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise ValueError("decoding the file takes too much CPU time")
    if not line_end or completed.returncode:
        raise ValueError(f"the decoder process failed with status {completed.returncode}")
    return head, output


def _refusal(reason: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the picture cannot be read: {reason}",
        hint="send a whole JPEG, PNG, WebP or GIF file of at most 32 MB and 32 megapixels, in base64",
        param=param,
    )
