"""Read documents: the text of PDF, DOCX and HTML files, or the pages of a PDF as pictures.

A sandboxed process (`document_reader_process`) reads each file. `param`, an argument of the functions,
is the request's field that an error names.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from pathlib import Path

from edgeinfer.errors import InvalidRequestError, UsageError
from edgeinfer.media import pictures

_HELPER = "edgeinfer.media.document_reader_process"
_HTML = re.compile(
    rb"(\xef\xbb\xbf)?\s*+(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*+<(!doctype\s+html|html|head|body)\b",
    re.IGNORECASE | re.DOTALL,
)
#: Maximum number of documents whose texts are cached, because a chat sends its documents in each turn.
_N_CACHED = 8
#: SHA-256 of the caller's API key and the file → cached text of the file. Callers with other keys do
#: not get the text.
_cached: OrderedDict[bytes, str] = OrderedDict()
_caching = threading.Lock()


def is_document(data: bytes) -> bool:
    """Return whether a whole file looks like PDF, DOCX or HTML."""
    is_docx = data.startswith(b"PK\x03\x04") and b"word/" in data
    return is_docx or is_pdf(data) or _is_html(data)


def is_pdf(data: bytes) -> bool:
    """Return whether the first bytes of a file are those of a PDF."""
    return b"%PDF-" in data[:1024]


def _is_html(data: bytes) -> bool:
    return bool(_HTML.match(data[:4096]))


def text_of(data: bytes, name: str, param: str = "messages") -> str:
    """Return the text of a document. Each page of a PDF begins with a line like `[page 3]`.

    Errors name the file (`name`) and the request's field (`param`; "" if the user attached the file in
    the chat). Raises InvalidRequestError if the file is broken, encrypted, too large or without text.
    """
    text = _text(data, name, param)
    if not text:
        raise InvalidRequestError(
            f"{name} contains no text",
            hint="if it is a scan, use `edgeinfer run --image` with a vision model",
            param=param,
        )
    return text


def pages_of(data: bytes, name: str, param: str = "messages") -> list[bytes]:
    """Return the pages of a PDF as PNG files. Raises what `text_of` raises."""
    output = _read(data, name, "pages", param)
    start, pages = 0, []
    while start < len(output):
        stop = start + 4 + int.from_bytes(output[start : start + 4], "little")
        pages.append(output[start + 4 : stop])
        start = stop
    return pages


def pictures_in(path: Path) -> list[bytes]:
    """Return a list of picture files: the file `path` itself, or the pages of a PDF as PNG.

    Raises UsageError if the file cannot be read, or is neither a picture nor a PDF.
    """
    try:
        with open(path.expanduser(), "rb") as file:
            data = file.read(pictures.MAX_FILE_BYTES + 1)
        return pages_of(data, path.name) if is_pdf(data) else [pictures.check_file(data)]
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", hint="check the path") from error
    except InvalidRequestError as error:
        hint = "give a JPEG, PNG, WebP, GIF or PDF file"
        raise UsageError(f"{path}: {error.message}", hint=hint) from error


def parts_of(text: str, name: str, param: str = "messages") -> list[str | bytes]:
    """Convert a file, in base64 or as a `data:` URI, to parts of a message: texts or picture files.

    A picture stays a picture, a PDF without text becomes pictures of its pages, and any other document
    or UTF-8 file becomes text. Raises what `text_of` raises.
    """
    data = pictures.decode_file(text, lambda reason: _refusal(name, reason, param))
    if pictures.is_picture(data):
        return [pictures.check_file(data, param)]
    if not is_document(data):
        try:
            return [f"File `{name}`:\n{data.decode('utf-8-sig')}\n\n"]
        except UnicodeDecodeError:
            raise _refusal(name, "the file is not a PDF, DOCX, HTML or UTF-8 text", param) from None
    if is_pdf(data) and not _text(data, name, param):
        return list(pages_of(data, name, param))
    return [f"File `{name}`:\n{text_of(data, name, param)}\n\n"]


def _text(data: bytes, name: str, param: str) -> str:
    caller = hashlib.sha256(pictures.current_caller.get().encode()).digest()
    key = hashlib.sha256(caller + data).digest()
    with _caching:
        if key in _cached:
            _cached.move_to_end(key)
            return _cached[key]
    kind = "html" if _is_html(data) else "text"
    pages = _read(data, name, kind, param).decode("utf-8", "replace").replace("\0", "").split("\f")
    has_text = any(page.strip() for page in pages)
    if is_pdf(data):
        pages = [f"[page {number}]\n{page.strip()}" for number, page in enumerate(pages, 1)]
    text = "\n\n".join(pages) if has_text else ""
    with _caching:
        _cached[key] = text
        if len(_cached) > _N_CACHED:
            _cached.popitem(last=False)
    return text


def _read(data: bytes, name: str, mode: str, param: str) -> bytes:
    if len(data) > pictures.MAX_FILE_BYTES:
        raise _refusal(name, f"the file has more than {pictures.MAX_FILE_BYTES >> 20} MB", param)
    try:
        return pictures.run_helper(_HELPER, data, mode)[1]
    except ValueError as error:
        raise _refusal(name, str(error), param) from None


def _refusal(name: str, reason: str, param: str) -> InvalidRequestError:
    hint = "attach a whole PDF or DOCX file, or its text"
    if param:
        hint = "send a PDF, a DOCX file or UTF-8 text in base64, or its text"
    return InvalidRequestError(f"{name} cannot be read: {reason}", hint=hint, param=param)
