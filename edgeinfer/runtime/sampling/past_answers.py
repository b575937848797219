"""Past answers of one user, in which suffix drafting searches: one file per model and salt.

    ROOT/MODEL/answers/NAME   NAME is a keyed hash of the salt

A file consists of int32 words: the next free index of the ring; for each of `_GRAMS` a table from the
hash of that many tokens to the index after them; the ring of tokens. An answer begins with a negative
word (minus the keyed hash of its conversation) and ends with another. The oldest answers are
overwritten as a whole, so no token is left without the word that names its conversation.

Several processes change a file, one at a time, and read it without a lock: the model verifies draft
tokens, so a half-written entry costs only one step. Nothing is flushed to disk. The file is not mapped:
on a full tmpfs, access to a hole of a mapping would end the process.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import SnapshotUnsafeError
from edgeinfer.platform import paths
from edgeinfer.platform.disk import open_private

FOLDER = "answers"
#: Number of tokens that a file of past answers stores, and of entries in each of its hash tables. A
#: file has at most 3 MiB.
RING = 1 << 18
#: Maximum number of files per model (96 MiB); the least recently written one is deleted first.
MAX_FILES = 32
#: Number of tokens before an answer that are stored, too, so that the answer's beginning can be found.
CONTEXT_TOKENS = 8
#: Maximum number of tokens that `common_suffix` compares.
LONGEST = 32
_GRAMS = (8, 4)
_WORD = 4
#: Offset (words) of each hash table, and the length (tokens) of the suffixes in the table.
_TABLES = tuple((1 + number * RING, n) for number, n in enumerate(_GRAMS))
_RING_AT = 1 + len(_GRAMS) * RING
#: int32 words per page. Linux completes the write of a page even if the process is killed.
_PAGE = 1024
_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_END = -1

Tokens = npt.NDArray[np.int32]


def _hash(tokens: Iterable[Any]) -> Any:
    """Hash tokens to a table's index. For arrays, hash each position; for eight tokens, Python integers
    are ten times as fast.
    """
    state: Any = 0
    for token in tokens:
        state = (state + token) * _FACTOR & _MASK
    return state >> 64 - RING.bit_length() + 1


def common_suffix(a: Tokens, b: Tokens) -> int:
    """Return the length of the longest common suffix of `a` and `b`, at most LONGEST."""
    n = min(len(a), len(b), LONGEST)
    differs = np.flatnonzero(a[len(a) - n :] != b[len(b) - n :])
    return n - 1 - int(differs[-1]) if len(differs) else n


class AnswerFile:
    """The file with the answers of one cache salt: a ring buffer of tokens, and hash tables for `find`.

    Garbage collection closes the file. Opening raises OSError, also if the file is not private.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, 0o600)
        # no finalizer at exit: it would run before the engine closes and writes the last answers
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        os.close(open_private(path))
        os.ftruncate(self._descriptor, (_RING_AT + RING) * _WORD)

    @property
    def is_deleted(self) -> bool:
        return os.fstat(self._descriptor).st_nlink == 0

    @property
    def ring(self) -> Tokens:
        """Copy of the whole ring buffer."""
        return self.read(0, RING)

    def read(self, index: int, n: int) -> Tokens:
        """Return up to `n` words of the ring buffer from `index` on; none if reading fails.

        A word is a token or a negative number, which marks the start or the end of an answer.
        """
        return self._read(_RING_AT + index, min(n, RING - index))

    def find(self, text: Tokens) -> tuple[int, int]:
        """Find the latest occurrence of a suffix of `text`; return the index after that in the ring
        buffer, and the length of the suffix (tokens); (0, 0) if there is none.
        """
        suffix = text[-max(_GRAMS) :].tolist()
        for table, n in _TABLES:
            index = min(max(0, self._word(table + _hash(suffix[-n:]))), RING)
            first = max(0, index - LONGEST)
            length = common_suffix(self.read(first, index - first), text)
            if length >= n:
                return index, length
        return 0, 0

    def add(self, owner: int, tokens: Sequence[int]) -> None:
        """Append an answer of the conversation `owner` to the ring. Raises OSError.

        `owner` is the result of `owner_number`. The answer's hashes are put into the tables.
        """
        entry = np.array([-owner, *tokens[: RING // 4], _END], np.int32)
        with self._file_lock():
            start = self._word(0)
            if not 0 <= start <= RING - len(entry):
                start = 0
            self._erase(start, self._end_of_answer(start + len(entry)))
            self._write(_RING_AT + start, entry)
            hashed = entry[1:-1].astype(np.uint64)
            for table, n in _TABLES:
                n_keys = max(0, len(hashed) - n + 1)
                keys = _hash(hashed[i : n_keys + i] for i in range(n))
                for i, key in enumerate(keys.tolist()):
                    self._write(table + key, np.int32(start + 1 + n + i))
            self._write(0, np.int32(start + len(entry) - 1))  # the next answer overwrites the end mark

    def forget(self, owners: Iterable[int]) -> int:
        """Erase the answers of the conversations `owners` (results of `owner_number`).

        Returns the number of erased bytes. Raises OSError.
        """
        erased = 0
        with self._file_lock():
            ring = self.ring
            bounds = np.flatnonzero(ring < 0).tolist()
            mine = {-owner for owner in owners}
            for begin, stop in pairwise([*bounds, RING]):
                if ring[begin] in mine:
                    self._erase(begin, stop)
                    erased += (stop - begin) * _WORD
                elif ring[begin] == _END and ring[begin + 1 : stop].any():
                    self._erase(begin, stop)  # an older version left the end of an overwritten answer
            self._drop_old_hashes()
        return erased

    def _end_of_answer(self, index: int) -> int:
        """Return the ring index at which the answer around `index` ends."""
        following = self.read(index, RING // 4 + 2)
        bounds = np.flatnonzero(following < 0)
        if len(bounds):
            return index + int(bounds[0])
        # only zeros: the ring was never written from `index` on, so the answer ends at `index`
        return index + len(following) if following.any() else index

    def _erase(self, begin: int, stop: int) -> None:
        """Overwrite [begin, stop), last page first: after a kill, the rest still names its owner."""
        first, last = _RING_AT + begin, _RING_AT + stop
        while last > first:
            low = max(first, (last - 1) // _PAGE * _PAGE)
            self._write(low, np.full(last - low, _END, np.int32))
            last = low

    def _drop_old_hashes(self) -> None:
        """Delete the table entries of erased text, because hashes would reveal the text."""
        ring = self.ring
        for table, n in _TABLES:
            places = self._read(table, RING).copy()
            keys = np.flatnonzero(places)
            ends = np.clip(places[keys], n, RING)
            grams = [ring[ends - n + i] for i in range(n)]
            hashes = _hash(gram.astype(np.uint64) for gram in grams)
            old_keys = keys[(np.min(grams, axis=0) < 0) | (hashes != keys)]
            places[old_keys] = 0
            for page in np.unique(old_keys // _PAGE * _PAGE).tolist():
                self._write(table + page, places[page : page + _PAGE])

    @contextmanager
    def _file_lock(self) -> Iterator[None]:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _word(self, word: int) -> int:
        return int(self._read(word, 1).sum())

    def _read(self, word: int, n: int) -> Tokens:
        try:
            raw = os.pread(self._descriptor, n * _WORD, word * _WORD)
        except OSError:
            raw = b""
        return np.frombuffer(raw, np.int32, len(raw) // _WORD)

    def _write(self, word: int, values: Tokens | np.int32) -> None:
        os.pwrite(self._descriptor, values.tobytes(), word * _WORD)


class PastAnswers:
    """The past answers to one model's requests: a file per cache salt, below `folder`. Thread-safe.

    A file's name is the hash of its salt with the key `secret`.
    """

    def __init__(self, folder: Path, secret: bytes) -> None:
        self._folder, self._secret = folder / FOLDER, secret
        self._files: OrderedDict[str, AnswerFile] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, salt: str) -> AnswerFile | None:
        """Return the answers of the cache salt `salt`; None if their file cannot be used."""
        with self._lock:
            try:
                return self._open(salt)
            except (OSError, SnapshotUnsafeError):
                return None

    def add(self, salt: str, conversation: str, tokens: Sequence[int]) -> None:
        """Append an answer to the file of the cache salt. Raises OSError, SnapshotUnsafeError."""
        with self._lock:
            self._open(salt).add(owner_number(self._secret, conversation), tokens)

    def _open(self, salt: str) -> AnswerFile:
        file = self._files.pop(salt, None)
        if file is None or file.is_deleted:
            paths.private_dir(self._folder.parent)
            paths.private_dir(self._folder)
            path = self._folder / _keyed_hash(self._secret, salt).hex()
            if not path.exists():
                self._prune()
            file = AnswerFile(path)
        self._files[salt] = file
        if len(self._files) > MAX_FILES:
            self._files.popitem(last=False)
        return file

    def _prune(self) -> None:
        files = sorted(self._folder.iterdir(), key=lambda path: path.lstat().st_mtime)
        for path in files[: max(0, len(files) - MAX_FILES + 1)]:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close every file; the object may be used again."""
        with self._lock:
            self._files.clear()


def _keyed_hash(secret: bytes, text: str) -> bytes:
    return hashlib.blake2b(text.encode(), key=secret, digest_size=16, person=FOLDER.encode()).digest()


def owner_number(secret: bytes, conversation: str) -> int:
    """Return the number that stands for a conversation in its AnswerFile: 31 bits of a hash."""
    return int.from_bytes(_keyed_hash(secret, "owner " + conversation)[:4], "little") % (1 << 31) | 2


def forget_answers(root: Path, secret: bytes, conversations: Iterable[str]) -> int:
    """Erase the answers of conversations in every file below `root`; return the number of erased bytes.

    A file that cannot be changed is deleted.
    """
    owners = [owner_number(secret, conversation) for conversation in conversations]
    erased = 0
    for path in root.glob(f"*/{FOLDER}/*"):
        try:
            erased += AnswerFile(path).forget(owners)
        except OSError:
            path.unlink(missing_ok=True)
    return erased
