"""Read, create and compare API keys.

Keys come from `EDGEINFER_API_KEY`, or from the file that `--api-key-file` or `EDGEINFER_API_KEY_FILE`
names, or from the file `api-key` (mode 0600) in the configuration directory. This file is created when
an endpoint first listens beyond loopback. Keys are never on the command line, in a log or in a
snapshot. The first key of a file is the administrator's; clients with other keys may only use models.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from edgeinfer.errors import ServeError
from edgeinfer.platform import paths

_MIN_LENGTH = 16


class Keys:
    """API keys, held as SHA-256 digests. A key's name is the first 8 hex digits of its digest."""

    def __init__(self, keys: Iterable[str]) -> None:
        digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._digests = tuple(dict.fromkeys(digests))

    def __len__(self) -> int:
        return len(self._digests)

    def name(self, offered: str) -> str | None:
        """Return the name of the key that equals `offered`; None if none does. Takes constant time."""
        digest = hashlib.sha256(offered.encode("utf-8", "surrogateescape")).digest()
        names = [key.hex()[:8] for key in self._digests if hmac.compare_digest(key, digest)]
        return names[0] if names else None

    @property
    def first(self) -> str:
        """Name of the first key, which is the administrator's; "" without keys."""
        return self._digests[0].hex()[:8] if self._digests else ""

    def cache_salt(self, name: str) -> str:
        """Return the salt that separates the cached prefixes of the key `name` from other keys'.

        It is "" if there is only one key.
        """
        if len(self._digests) < 2:
            return ""
        digest = next(digest for digest in self._digests if digest.hex()[:8] == name)
        return hmac.digest(digest, b"edgeinfer computed blocks", "sha256").hex()


def key_path() -> Path:
    return paths.config_dir() / "api-key"


def configured_keys(file: str | None = None) -> Keys:
    """Return the keys in `EDGEINFER_API_KEY`, in `file`, or in the file `EDGEINFER_API_KEY_FILE`.

    The first of these that is set counts; if none is set, there are no keys. Raises ServeError if the
    file does not exist, and what `read_keys` raises.
    """
    key = os.environ.get("EDGEINFER_API_KEY", "")
    if key:
        return Keys([_check(key, "EDGEINFER_API_KEY")])
    path = file or os.environ.get("EDGEINFER_API_KEY_FILE", "")
    option = "--api-key-file" if file else "EDGEINFER_API_KEY_FILE"
    try:
        return Keys(read_keys(Path(path)) if path else [])
    except FileNotFoundError as error:
        hint = "name a file with one API key per line; `openssl rand -hex 32` makes a key"
        raise ServeError(f"{option} names {path}, which does not exist", hint=hint) from error


def stored_keys() -> tuple[Keys, bool]:
    """Return the keys in the file `key_path()`, and whether this call has made the file.

    A new file has one random key. Raises what `read_keys` raises for an existing file.
    """
    path = key_path()
    try:
        return Keys(read_keys(path)), False
    except FileNotFoundError:
        pass
    paths.make_folder(path.parent)
    key = f"ei-{secrets.token_urlsafe(32)}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:  # another `edgeinfer serve` has just created the file
        return Keys(read_keys(path)), False
    with os.fdopen(descriptor, "w") as file:
        file.write(key + "\n")
    return Keys([key]), True


def own_key() -> str:
    """Return the key that the user's own clients send to the endpoint; "" if there is none.

    Raises ServeError if the key file cannot be used (`read_keys`).
    """
    key = os.environ.get("EDGEINFER_API_KEY", "")
    if key:
        return key
    file = os.environ.get("EDGEINFER_API_KEY_FILE", "")
    try:
        return read_keys(Path(file) if file else key_path())[0]
    except FileNotFoundError:
        return ""


def read_keys(path: Path) -> list[str]:
    """Read a file of keys, one per line; lines that begin with `#` are comments.

    Raises FileNotFoundError. Raises ServeError if the file cannot be read, or other users can read it,
    or it has no key or an invalid one.
    """
    try:
        with path.open(encoding="utf-8") as file:
            info = os.fstat(file.fileno())
            if not _is_private(info):
                message = f"{path} holds API keys but other users can read it"
                raise ServeError(message, hint=f"chmod 600 {path}")
            lines = [line.strip() for line in file]
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the file is not UTF-8 text"
        hint = "make the file of API keys readable for you, and only for you"
        raise ServeError(f"{path}: {reason}", hint=hint) from error
    keys = [_check(line, str(path)) for line in lines if line and not line.startswith("#")]
    if not keys:
        hint = f"write one API key per line: `openssl rand -hex 32 >> {path}`"
        raise ServeError(f"{path} has no API key", hint=hint)
    return keys


def _is_private(info: os.stat_result) -> bool:
    mode = stat.S_IMODE(info.st_mode)
    if os.getuid() != info.st_uid == 0 and info.st_gid in (os.getegid(), *os.getgroups()):
        # if a Kubernetes Secret is mounted with fsGroup, its file has owner root, a group of this
        # process, and mode 0440: accept it
        return not mode & 0o037
    return info.st_uid in (os.getuid(), 0) and not mode & 0o077


def _check(key: str, where: str) -> str:
    if len(key) < _MIN_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
        rule = f"{_MIN_LENGTH} or more printable ASCII characters without spaces"
        raise ServeError(f"the key in {where} must be {rule}", hint="make one: `openssl rand -hex 32`")
    return key
