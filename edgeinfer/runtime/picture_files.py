"""Take and decode the files of pictures: JPEG, PNG, WebP and the first frame of GIF.

Each file is decoded in a process of its own, with limits and without access to files, sockets and other
processes (`picture_decoder_process`), because the file may come from anyone.
"""

from __future__ import annotations

import base64
import binascii
import re
import signal
import subprocess
from collections.abc import Callable
from threading import BoundedSemaphore

from edgeinfer.errors import InvalidRequestError
from edgeinfer.platform.process import child_command
from edgeinfer.runtime.pictures import Picture

_HELPER = "edgeinfer.runtime.picture_decoder_process"
#: The largest file that is decoded (bytes).
MAX_FILE_BYTES = 32 << 20
#: The decoder's own limit is on its processor time; a busy machine takes longer.
_PATIENCE_S = 60.0
_DATA_URI = re.compile(r"data:[\w.+/-]*(;[\w.+-]+=[^;,]*)*;base64,", re.IGNORECASE)
_MAGIC = re.compile(
    rb"(?P<JPEG>\xff\xd8\xff)|(?P<PNG>\x89PNG\r\n\x1a\n)|(?P<GIF>GIF8)|(?P<WEBP>RIFF....WEBP)",
    re.DOTALL,
)
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE)

#: Most pictures of one request.
MAX_PICTURES = 64
#: Decoders at once: each may take 512 MB.
_decoders = BoundedSemaphore(2)


def format_of(data: bytes) -> str:
    """Return a picture's format by its magic bytes, "" for another file."""
    found = _MAGIC.match(data)
    return (found and found.lastgroup) or ""


def is_picture(data: bytes) -> bool:
    """Tell by its magic bytes if a file is a picture."""
    return bool(format_of(data))


def checked(data: bytes, param: str = "messages") -> bytes:
    """Return a file's bytes if they may be a picture. Raises InvalidRequestError about `param`."""
    if len(data) > MAX_FILE_BYTES:
        raise _refusal(f"the file has more than {MAX_FILE_BYTES >> 20} MB", param)
    if not is_picture(data):
        raise _refusal("it is no JPEG, PNG, WebP or GIF file", param)
    return data


def from_base64(text: str, param: str = "messages") -> bytes:
    """Return the picture's file in base64, alone or as a `data:` URI. Raises as `checked`."""
    return checked(file_in(text, lambda reason: _refusal(reason, param)), param)


def file_in(text: str, refusal: Callable[[str], InvalidRequestError]) -> bytes:
    """Return any file in base64, alone or as a `data:` URI. Raises the `refusal` for a reason."""
    found = _DATA_URI.match(text)
    scheme = None if found else _SCHEME.match(text)
    if scheme is not None:
        raise refusal(f"{scheme[1].lower()}: addresses are not fetched")
    try:
        return base64.b64decode(text[found.end() if found else 0 :], validate=True)
    except (binascii.Error, ValueError):
        raise refusal("it is not valid base64") from None


def decode(data: bytes, param: str = "messages") -> Picture:
    """Decode a file's bytes. It waits for a process: 0.1 s for a photo.

    Raises InvalidRequestError, which names `param`, for a file that is none of the formats, broken, or
    too large.
    """
    try:
        head, pixels = answer_of(_HELPER, checked(data, param), format_of(data))
        width, height = map(int, head.split())
        return Picture(width, height, pixels)
    except ValueError as error:
        raise _refusal(str(error), param) from None


def answer_of(helper: str, data: bytes, *arguments: str) -> tuple[bytes, bytes]:
    """Return what a process that reads one file answers: its first line, and the rest.

    Raises ValueError with the reason that it, or its limits, refuse the file for.
    """
    try:
        with _decoders:
            done = subprocess.run(
                child_command(helper, *arguments),
                input=data,
                capture_output=True,
                timeout=_PATIENCE_S,
                check=False,
            )
    except subprocess.TimeoutExpired:
        raise ValueError(f"decoding it takes more than {_PATIENCE_S:.0f} s") from None
    head, line_end, rest = done.stdout.partition(b"\n")
    if head.startswith(b"error "):
        raise ValueError(done.stdout[6:].decode("utf-8", "replace"))
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise ValueError("decoding it takes too much processor time")
    if not line_end or done.returncode:
        raise ValueError(f"its decoder ended with status {done.returncode}")
    return head, rest


def _refusal(reason: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the picture cannot be read: {reason}",
        hint="send a JPEG, PNG, WebP or GIF file in base64",
        param=param,
    )
