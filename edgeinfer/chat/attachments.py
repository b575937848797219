"""Files attached to a question (`@path`): texts, documents, pictures and folders of text files."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from edgeinfer.chat.formats import fence
from edgeinfer.chat.history.values import Attachment
from edgeinfer.errors import InvalidRequestError, UsageError
from edgeinfer.media import document_files, pictures
from edgeinfer.runtime.interface import Engine

#: Maximum size (bytes) of an attached text; a larger one would not fit into any model's context.
MAX_BYTES = 4 << 20

#: Pasted texts are attached under this name and a number: `pasted text 1`.
PASTED = "pasted text"

#: Maximum number of files in an attached folder; hidden folders and the names in _LEFT_OUT are skipped.
_MAX_FILES = 1000
_LEFT_OUT = ("CVS", "node_modules", "__pycache__")

#: Matches `@name` or `@"any name"` at the start or after a space. An unquoted name does not end with
#: punctuation.
_MENTION = re.compile(r'(?<!\S)@(?:"([^"\n]+)"|([^\s"]*[^\s".,;?!)]))')

#: Matches a name that can only be a path: one with a slash, or with a suffix such as `.txt`.
_PATH = re.compile(r"/|\.\w*[a-zA-Z]\w*$")


def mentions(text: str) -> list[str]:
    """Return the names after `@` in `text`, each once: ["notes.txt", "ann"] for `@notes.txt @ann`."""
    return list(dict.fromkeys(match[1] or match[2] for match in _MENTION.finditer(text)))


def mentioned_paths(text: str, cwd: Path | None = None) -> list[Path]:
    """Return the existing files (`@a.txt`) and folders (`@docs/`) that `text` mentions, each once.

    Relative names are resolved against `cwd` (None: the working folder).
    """
    paths: dict[Path, None] = {}
    for named in mentions(text):
        path = (cwd or Path.cwd()) / os.path.expanduser(named)
        if os.path.isfile(path) or (named.endswith("/") and os.path.isdir(path)):
            paths[path] = None
    return list(paths)


def missing_files(text: str) -> list[str]:
    """Return the paths that `text` mentions (`@docs/a`), but at which no file or folder exists."""
    paths = [name for name in mentions(text) if _PATH.search(name) and ":" not in name]
    return [path for path in paths if not os.path.exists(os.path.expanduser(path))]


def missing_note(text: str) -> str:
    """Return a note for the user with the paths of `missing_files`; "" if all files exist."""
    missing = missing_files(text)
    return f"No such file: {', '.join(missing)}. The question was sent without it." if missing else ""


def dropped_picture(text: str) -> str:
    """Return `@"PATH" ` if `text` is the absolute path of a picture or PDF file; otherwise "".

    A terminal pastes such a path when the user drags a file into its window.
    """
    try:
        paths = shlex.split(text.strip().removeprefix("file://"))
        path = Path(paths[0]) if len(paths) == 1 else None
        if path is None or not path.is_absolute():
            return ""
        with open(path, "rb") as file:
            head = file.read(16)
            is_picture = pictures.is_picture(head) or document_files.is_pdf(head)
    except (OSError, ValueError):
        return ""
    return f'@"{path}" ' if is_picture and '"' not in str(path) else ""


def read(path: Path) -> Attachment:
    """Read a file, or all text files of a folder. Raises UsageError if `path` cannot be attached."""
    if os.path.isdir(path):
        return _folder(path)
    # reading a pipe, for example, would never end
    if os.path.exists(path) and not os.path.isfile(path):
        problem = f"{path} is a pipe, a socket or a device, not a file or folder"
        raise UsageError(problem, hint="save the content as a file, and attach that file")
    try:
        with open(path, "rb") as file:
            return from_bytes(path.name, file.read(pictures.MAX_FILE_BYTES + 1))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        raise UsageError(
            f"{path} cannot be read: {reason}", hint="check the path and the file's permissions"
        ) from error


def _folder(folder: Path) -> Attachment:
    texts: list[str] = []
    left_out: list[str] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in _LEFT_OUT)
        for path in (Path(parent, name) for name in sorted(names) if name[0] != "."):
            text, name = _plain_text(path), str(path.relative_to(folder))
            if text is None:
                left_out.append(name)
            else:
                texts.append(f"File `{name}`:\n{fence(text)}")
            if sum(map(len, texts)) > MAX_BYTES or len(texts) + len(left_out) > _MAX_FILES:
                is_long = sum(map(len, texts)) > MAX_BYTES
                limit = f"{MAX_BYTES >> 20} MiB of text" if is_long else f"{_MAX_FILES:,} files"
                raise UsageError(f"{folder} has more than {limit}", hint="attach one of its subfolders")
    if not texts:
        raise UsageError(
            f"the folder {folder} contains no UTF-8 text file",
            hint="attach pictures and documents (PDF, DOCX) one by one",
        )
    without = ", without " * bool(left_out) + ", ".join(left_out[:5]) + ", …" * (len(left_out) > 5)
    return Attachment(name=f"{folder.resolve().name}/{without}", text="\n\n".join(texts))


def _plain_text(path: Path) -> str | None:
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_BYTES:
            return None
        with open(path, "rb") as file:
            data = file.read(1 << 13)
            return None if b"\0" in data else (data + file.read(MAX_BYTES)).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None


def from_bytes(name: str, data: bytes) -> Attachment:
    """Make an attachment. Raises UsageError if `data` is too large or of an unsupported kind."""
    if pictures.is_picture(data):
        if len(data) > pictures.MAX_FILE_BYTES:
            limit = f"{pictures.MAX_FILE_BYTES >> 20} MiB"
            raise UsageError(f"{name} is larger than {limit}", hint="attach a smaller picture")
        return Attachment(name=name, data=data)
    if document_files.is_document(data):
        try:
            return Attachment(name=name, text=document_files.text_of(data, name, param=""))
        except InvalidRequestError as error:
            raise UsageError(error.message, hint=error.hint) from error
    if len(data) > MAX_BYTES:
        raise UsageError(f"{name} is larger than {MAX_BYTES >> 20} MiB", hint="attach a part of it")
    if b"\0" in data and data[:2] not in (BOM_UTF16_LE, BOM_UTF16_BE):
        raise UsageError(f"{name} is a binary file", hint="attach text, PDF, DOCX, HTML or a picture")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not UTF-8 text",
            hint="convert the file, e.g. `iconv -f latin1 -t utf-8 FILE > NEW_FILE`",
        ) from error
    return Attachment(name=name, text=text)


def merge(old: Sequence[Attachment], new: Sequence[Attachment]) -> tuple[Attachment, ...]:
    """Return the attachments of an edited question: new files replace old files of the same name."""
    names = {attachment.name for attachment in new if not attachment.name.startswith(PASTED)}
    return (*(attachment for attachment in old if attachment.name not in names), *new)


def count_tokens(attachment: Attachment, engine: Engine | None) -> Attachment:
    """Return the attachment with its number of tokens; unchanged for a picture or without an engine."""
    if attachment.tokens or attachment.is_picture or engine is None:
        return attachment
    return msgspec.structs.replace(attachment, tokens=len(engine.tokenize(attachment.text)))


def describe(attachment: Attachment) -> str:
    """Return the name and size of an attachment: `notes.txt, 120 tokens` or `cat.png, a picture`."""
    size = "a picture" if attachment.is_picture else f"{attachment.tokens} tokens"
    return f"{attachment.name}, {size}"


def with_attachments(text: str, attachments: Iterable[Attachment]) -> str:
    """Return the text that the model gets: each attached text in a Markdown fence, then `text`."""
    parts = [f"File `{a.name}`:\n{fence(a.text)}" for a in attachments if not a.is_picture]
    return "\n\n".join([*parts, text] if text else parts)


def complete(typed: str, cwd: Path | None = None, limit: int = 50) -> list[str]:
    """Return up to `limit` existing paths that begin with `typed`; a folder's path ends with a slash.

    Hidden names are returned only if the typed name begins with a dot. Relative paths are resolved
    against `cwd` (None: the working folder).
    """
    folder, _, start = typed.rpartition("/")
    shown = f"{folder}/" if folder or typed.startswith("/") else "."
    base = (cwd or Path.cwd()) / os.path.expanduser(shown)
    try:
        entries = sorted(os.scandir(base), key=lambda e: (not os.path.isdir(e), e.name))
    except OSError:
        return []
    prefix = typed[: len(typed) - len(start)]
    names = [e.name + ("/" if os.path.isdir(e) else "") for e in entries if e.name.startswith(start)]
    shown_names = (name for name in names if start.startswith(".") or not name.startswith("."))
    return [prefix + name for name in itertools.islice(shown_names, limit)]
