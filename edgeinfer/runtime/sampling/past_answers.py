"""Past answers of one user, which suffix drafting looks up: one file for each model and salt, mapped.

    ROOT/MODEL/answers/NAME   NAME is a keyed hash of the salt

A file is int32 words: the next free place of the ring; for each of `_GRAMS` a table from the hash of
that many tokens to the place behind them; the ring of tokens. An answer begins with a negative word,
minus the keyed hash of its conversation, and ends with another. The oldest answers are overwritten.

Several processes append to a file, one at a time, and read it without a lock: a draft token is verified
by the model, so a half-written entry costs one step. Nothing of it is durable.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import SnapshotUnsafeError
from edgeinfer.platform import paths
from edgeinfer.platform.disk import open_own

FOLDER = "answers"
#: Tokens of the ring, and entries of a table: a file has 3 MiB at most.
RING = 1 << 18
#: Files of a model, least recently written deleted first: 96 MiB at most.
MAX_FILES = 32
#: Tokens before an answer that are written with it, so that its first ones can be found.
CONTEXT_TOKENS = 8
#: A suffix is compared up to so many tokens.
LONGEST = 32
_GRAMS = (8, 4)
_WORD = 4
_RING_AT = 1 + len(_GRAMS) * RING
_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_END = -1

Tokens = npt.NDArray[np.int32]


def _hash(tokens: Iterable[Any]) -> Any:
    """Hash tokens to a table's index: numbers, as numpy takes ten times as long for eight of them, or
    arrays, of which each place is hashed.
    """
    state: Any = 0
    for token in tokens:
        state = (state + token) * _FACTOR & _MASK
    return state >> 64 - RING.bit_length() + 1


def common_suffix(a: Tokens, b: Tokens) -> int:
    """Length of the longest common suffix, up to LONGEST."""
    n = min(len(a), len(b), LONGEST)
    differs = np.flatnonzero(a[len(a) - n :] != b[len(b) - n :])
    return n - 1 - int(differs[-1]) if len(differs) else n


class AnswerFile:
    """The answers of one salt. Raises OSError."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, 0o600)
        try:
            os.close(open_own(path))
            os.ftruncate(self._descriptor, (_RING_AT + RING) * _WORD)
            mapped = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._words: Tokens = np.frombuffer(mapped, np.int32)
        self.ring = self._words[_RING_AT:]

    @property
    def is_deleted(self) -> bool:
        return os.fstat(self._descriptor).st_nlink == 0

    def find(self, text: Tokens) -> tuple[int, int]:
        """Return the place in `ring` behind the latest occurrence of the end of `text`, and how many
        tokens agree; (0, 0) for none.
        """
        end = text[-max(_GRAMS) :].tolist()
        for number, n in enumerate(_GRAMS):
            if len(end) < n:
                continue
            place = int(self._words[1 + number * RING + _hash(end[-n:])])
            if not n <= place < RING:
                continue
            length = common_suffix(self.ring[max(0, place - LONGEST) : place], text)
            if length >= n:
                return place, length
        return 0, 0

    def add(self, owner: int, tokens: Sequence[int]) -> None:
        """Append an answer. Raises OSError."""
        entry = np.array([-owner, *tokens[: RING // 4], _END], np.int32)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            at = int(self._words[0])
            at = at if 0 <= at <= RING - len(entry) else 0
            self._write(_RING_AT + at, entry)
            for number, n in enumerate(_GRAMS):
                if len(tokens) < n:
                    continue
                words = entry[1:-1].astype(np.uint64)
                keys = _hash(words[i : len(words) - n + 1 + i] for i in range(n))
                for i, key in enumerate(keys.tolist()):
                    self._write(1 + number * RING + key, np.int32(at + 1 + n + i))
            self._write(0, np.int32(at + len(entry) - 1))  # the next answer overwrites the end
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def forget(self, owner: int) -> int:
        """Erase the answers of a conversation; return the erased bytes. Raises OSError."""
        bounds = np.flatnonzero(self.ring < 0).tolist()
        erased = 0
        for begin, end in pairwise([*bounds, RING]):
            if self.ring[begin] == -owner:
                self._write(_RING_AT + begin, np.full(end - begin, _END, np.int32))
                erased += (end - begin) * _WORD
        return erased

    def _write(self, word: int, values: Tokens | np.int32) -> None:
        """Write, not store to the mapping: on a full disk that would end the process."""
        os.pwrite(self._descriptor, values.tobytes(), word * _WORD)

    def close(self) -> None:
        os.close(self._descriptor)


class PastAnswers:
    """The answers of one model, below `folder`; `secret` keys names. Any thread."""

    def __init__(self, folder: Path, secret: bytes) -> None:
        self._folder, self._secret = folder / FOLDER, secret
        self._files: OrderedDict[str, AnswerFile] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, salt: str) -> AnswerFile | None:
        """Return the answers of `salt`, None without a usable file."""
        with self._lock:
            try:
                return self._open(salt)
            except (OSError, SnapshotUnsafeError):
                return None

    def add(self, salt: str, conversation: str, tokens: Sequence[int]) -> None:
        """Append an answer. Raises OSError, SnapshotUnsafeError."""
        with self._lock:
            self._open(salt).add(owner_number(self._secret, conversation), tokens)

    def _open(self, salt: str) -> AnswerFile:
        found = self._files.pop(salt, None)
        if found is not None and found.is_deleted:
            found.close()
            found = None
        if found is None:
            paths.private_dir(self._folder.parent)
            paths.private_dir(self._folder)
            path = self._folder / _keyed(self._secret, salt).hex()
            if not path.exists():
                self._prune()
            found = AnswerFile(path)
        self._files[salt] = found
        if len(self._files) > MAX_FILES:
            self._files.popitem(last=False)[1].close()
        return found

    def _prune(self) -> None:
        files = sorted(self._folder.iterdir(), key=lambda path: path.lstat().st_mtime)
        for path in files[: max(0, len(files) - MAX_FILES + 1)]:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close every file; may be used again."""
        with self._lock:
            while self._files:
                self._files.popitem()[1].close()


def _keyed(secret: bytes, text: str) -> bytes:
    return hashlib.blake2b(text.encode(), key=secret, digest_size=16, person=FOLDER.encode()).digest()


def owner_number(secret: bytes, conversation: str) -> int:
    """Name a conversation in a ring: a positive number of 31 bits."""
    return int.from_bytes(_keyed(secret, "owner " + conversation)[:4], "little") % (1 << 31) | 2


def forget_answers(root: Path, secret: bytes, conversation: str) -> int:
    """Erase a conversation's answers in every file below `root`; return the erased bytes."""
    erased = 0
    for path in root.glob(f"*/{FOLDER}/*"):
        with closing(AnswerFile(path)) as file:
            erased += file.forget(owner_number(secret, conversation))
    return erased
