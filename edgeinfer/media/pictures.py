"""Pictures of a message: their files, decoded pixels, and places in its text."""

from __future__ import annotations

import base64
import re
import signal
import subprocess
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from threading import BoundedSemaphore

from edgeinfer.errors import InvalidRequestError
from edgeinfer.platform.process import child_command

#: Placeholder in `Message.content` for each picture, in order. A noncharacter, which no text contains.
PICTURE_MARK = "\ufdd1"
#: Text that people see in place of the mark.
SHOWN = "[picture]"


@dataclass(frozen=True, slots=True)
class Picture:
    """Decoded pixels: 8-bit RGB, row by row, `3 * width * height` bytes."""

    width: int
    height: int
    rgb: bytes

    def __post_init__(self) -> None:
        if min(self.width, self.height) < 1 or len(self.rgb) != 3 * self.width * self.height:
            raise ValueError(f"{len(self.rgb)} bytes cannot be a picture of {self.width}x{self.height}")


def join_parts(parts: Iterable[str | bytes]) -> tuple[str, tuple[bytes, ...]]:
    """Return the `content` and `pictures` of a message from texts and picture files, in order."""
    content: list[str] = []
    pictures: list[bytes] = []
    for piece in parts:
        if isinstance(piece, bytes):
            pictures.append(piece)
            content.append(PICTURE_MARK)
        else:
            content.append(piece.replace(PICTURE_MARK, ""))
    return "".join(content), tuple(pictures)


_HELPER = "edgeinfer.media.picture_decoder_process"
#: Largest file (bytes) that is decoded.
MAX_FILE_BYTES = 32 << 20
#: How long (s) to wait for the decoder. It limits its own CPU time; a busy machine takes longer.
_PATIENCE_S = 60.0
_DATA_URI = re.compile(r"data:[\w.+/-]*(;[\w.+-]+=[^;,]*)*;base64,", re.IGNORECASE)
_MAGIC = re.compile(
    rb"(?P<JPEG>\xff\xd8\xff)|(?P<PNG>\x89PNG\r\n\x1a\n)|(?P<GIF>GIF8)|(?P<WEBP>RIFF....WEBP)",
    re.DOTALL,
)
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE)

#: Most pictures of one request.
MAX_PICTURES = 64
#: Most concurrent decoders, each of which may take 512 MB. One of several API keys gets at most two.
_decoders = BoundedSemaphore(3)
_MOST_OF_CALLER = 2
_decoders_of: dict[str, BoundedSemaphore] = {}
#: Caller whose files this thread decodes; "" is not limited.
current_caller = ContextVar("current_caller", default="")


def _own_decoders() -> AbstractContextManager[object]:
    caller = current_caller.get()
    if not caller:
        return nullcontext()
    return _decoders_of.setdefault(caller, BoundedSemaphore(_MOST_OF_CALLER))


def format_of(data: bytes) -> str:
    """Return a picture's format by its magic bytes, "" for another file."""
    match = _MAGIC.match(data)
    return (match and match.lastgroup) or ""


def is_picture(data: bytes) -> bool:
    """Return whether a file is a picture, judged by its magic bytes."""
    return bool(format_of(data))


def check_file(data: bytes, param: str = "messages") -> bytes:
    """Return a file's bytes if they may be a picture. Raises InvalidRequestError for `param`."""
    if len(data) > MAX_FILE_BYTES:
        raise _refusal(f"the file has more than {MAX_FILE_BYTES >> 20} MB", param)
    if not is_picture(data):
        raise _refusal("it is not a JPEG, PNG, WebP or GIF file", param)
    return data


def from_base64(text: str, param: str = "messages") -> bytes:
    """Decode a picture file from base64, bare or as a `data:` URI. Raises what `check_file` raises."""
    return check_file(file_in(text, lambda reason: _refusal(reason, param)), param)


def file_in(text: str, refusal: Callable[[str], InvalidRequestError]) -> bytes:
    """Decode a file from base64 or a `data:` URI. On failure raises `refusal(reason)`."""
    uri = _DATA_URI.match(text)
    if uri is None and (scheme := _SCHEME.match(text)) is not None:
        raise refusal(f"{scheme[1].lower()}: URLs are not fetched")
    encoded = text[uri.end() if uri else 0 :]
    with suppress(ValueError):
        return base64.b64decode(encoded, validate=True)
    plain = "".join(encoded.split()).rstrip("=")  # allow line breaks, no padding, URL-safe
    plain = plain.replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except ValueError:
        raise refusal("it is not valid base64") from None


def decode(data: bytes, param: str = "messages") -> Picture:
    """Decode a file in a separate process under limits. A photo takes about 0.1 s.

    Raises InvalidRequestError, which names `param`, for a file of another format, broken or too large.
    """
    try:
        head, pixels = answer_of(_HELPER, check_file(data, param), format_of(data))
        width, height = map(int, head.split())
        return Picture(width, height, pixels)
    except ValueError as error:
        raise _refusal(str(error), param) from None


def answer_of(helper: str, data: bytes, *arguments: str) -> tuple[bytes, bytes]:
    """Return a file-reading process's result: its first line, and the rest.

    Raises ValueError with the reason why the process, or its limits, refused the file.
    """
    try:
        with _own_decoders(), _decoders:
            done = subprocess.run(
                child_command(helper, *arguments),
                input=data,
                capture_output=True,
                timeout=_PATIENCE_S,
                check=False,
            )
    except subprocess.TimeoutExpired:
        raise ValueError(f"decoding it takes more than {_PATIENCE_S:.0f} s") from None
    head, line_end, output = done.stdout.partition(b"\n")
    if head.startswith(b"error "):
        raise ValueError(done.stdout[6:].decode("utf-8", "replace"))
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise ValueError("decoding it takes too much CPU time")
    if not line_end or done.returncode:
        raise ValueError(f"its decoder ended with status {done.returncode}")
    return head, output


def _refusal(reason: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the picture cannot be read: {reason}",
        hint="send a JPEG, PNG, WebP or GIF file in base64",
        param=param,
    )
