"""Decode the files of pictures: JPEG, PNG, WebP and the first frame of GIF.

Each file is decoded in a process of its own, with limits and without access to files, sockets and other
processes (`picture_decoder_process`), because the file may come from anyone.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import signal
import subprocess
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import Any, TypeVar

from edgeinfer.errors import InvalidRequestError, UsageError
from edgeinfer.platform.process import child_command
from edgeinfer.runtime.pictures import Picture

T = TypeVar("T")
_HELPER = "edgeinfer.runtime.picture_decoder_process"
#: The largest file that is decoded (bytes).
MAX_FILE_BYTES = 32 << 20
#: The decoder's own limit is on its processor time; a busy machine takes longer.
_PATIENCE_S = 60.0
_DATA_URI = re.compile(r"data:(image/[\w.+-]+)?(;[\w.+-]+=[^;,]*)*;base64,", re.IGNORECASE)
_MAGIC = re.compile(rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|GIF8|RIFF....WEBP", re.DOTALL)
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE)

#: Most pictures of one request.
MAX_PICTURES = 64
#: Pictures that the request being translated may still have; None without a limit.
_left: ContextVar[int | None] = ContextVar("edgeinfer_pictures_left", default=None)
#: Decoders at once: each may take 512 MB.
_decoders = BoundedSemaphore(2)

#: Pixels of the last pictures by the SHA-256 of their file: a conversation sends them again each turn,
#: and decoding one takes 0.1 s.
_KEPT_BYTES = 64 << 20
_kept: OrderedDict[bytes, Picture] = OrderedDict()
_lock = Lock()


def within_budget(work: Callable[..., T], *args: Any) -> T:
    """Call `work`, inside of which `MAX_PICTURES` are decoded at most."""
    token = _left.set(MAX_PICTURES)
    try:
        return work(*args)
    finally:
        _left.reset(token)


def is_picture(data: bytes) -> bool:
    """Tell by its magic bytes if a file is a picture."""
    return _MAGIC.match(data) is not None


def decode(data: bytes, param: str = "messages") -> Picture:
    """Decode a file's bytes, or return the picture they gave before.

    Raises InvalidRequestError, which names `param`, for a file that is none of the formats, broken, or
    too large. It waits for a process: 0.1 s for a photo.
    """
    left = _left.get()
    if left is not None:
        if left < 1:
            raise InvalidRequestError(f"more than {MAX_PICTURES} pictures", param=param)
        _left.set(left - 1)
    if len(data) > MAX_FILE_BYTES:
        raise _refusal(f"the file has more than {MAX_FILE_BYTES >> 20} MB", param)
    key = hashlib.sha256(data).digest()
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key]
    picture = _decoded(data, param)
    with _lock:
        _kept[key] = picture
        while len(_kept) > 1 and sum(len(one.rgb) for one in _kept.values()) > _KEPT_BYTES:
            _kept.popitem(last=False)
    return picture


def decode_text(text: str, param: str = "messages") -> Picture:
    """Decode a picture in base64, alone or as a `data:` URI. Raises as `decode`."""
    found = _DATA_URI.match(text)
    scheme = None if found else _SCHEME.match(text)
    if scheme is not None:
        raise _refusal(f"{scheme[1].lower()}: addresses are not fetched", param)
    try:
        data = base64.b64decode(text[found.end() if found else 0 :], validate=True)
    except (binascii.Error, ValueError):
        raise _refusal("it is not valid base64", param) from None
    return decode(data, param)


def read(path: Path) -> Picture:
    """Decode a file. Raises UsageError if it cannot be read or is no picture."""
    try:
        with open(path.expanduser(), "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", hint="check the path") from error
    try:
        return decode(data)
    except InvalidRequestError as error:
        raise UsageError(
            f"{path}: {error.message}", hint="give a JPEG, PNG, WebP or GIF file"
        ) from error


def forget() -> None:
    """Forget the pixels that are kept."""
    with _lock:
        _kept.clear()


def _decoded(data: bytes, param: str) -> Picture:
    try:
        with _decoders:
            done = subprocess.run(
                child_command(_HELPER),
                input=data,
                capture_output=True,
                timeout=_PATIENCE_S,
                check=False,
            )
    except subprocess.TimeoutExpired:
        raise _refusal(f"decoding it takes more than {_PATIENCE_S:.0f} s", param) from None
    head, _, pixels = done.stdout.partition(b"\n")
    if head.startswith(b"error "):
        raise _refusal(done.stdout[6:].decode("utf-8", "replace"), param)
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise _refusal("decoding it takes too much processor time", param)
    try:
        width, height = map(int, head.split())
        return Picture(width, height, pixels)
    except ValueError:
        raise _refusal(f"its decoder ended with status {done.returncode}", param) from None


def _refusal(reason: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the picture cannot be read: {reason}",
        hint="send a JPEG, PNG, WebP or GIF file in base64",
        param=param,
    )
