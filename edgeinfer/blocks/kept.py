"""What sessions of an agent begin with: names of blocks, a file an agent, which are pruned last.

    FOLDER/kept/AGENT[.SALT]   how many sessions were noted; names of the blocks that all begin with;
                               after an empty line the names of blocks behind them, in the middle of
                               which they part

One session says only how it began, with what a person wrote in it. What a second one shares with it is
the agent's own: instructions and tools. So nothing is kept before there were two, and from then on what
all of them share. Of what stands behind it the latest few are noted: a session in the same folder
shares more with one of them.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.platform.disk import new_file, open_own

_FOLDER = "kept"
#: An agent's name becomes the name of a file, with a digest of the salt: those who give another one
#: share no block.
_AGENT = re.compile(r"[a-z0-9-]{1,32}")
_FILE = re.compile(r"[a-z0-9-]{1,32}(\.[0-9a-f]{16})?")
#: An agent that was changed shares less than this with its past, and begins anew.
_SAME_SHARE = 0.5
#: Sessions that are told apart: one, and more.
_SEVERAL = 2
#: Blocks in which sessions part that are noted, the latest first.
_BEHIND = 8


@dataclass(frozen=True, slots=True)
class _Noted:
    """`shared` are names in order, `behind` the names of blocks behind the last, the latest first."""

    sessions: int = 0
    shared: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()


def note_session(folder: Path, agent: str, names: Sequence[str], salt: str = "") -> None:
    """Note that a session of `agent` begins with the blocks of these names. Raises OSError."""
    if not names or not _AGENT.fullmatch(agent):
        return
    path = _path(folder, agent, salt)
    before = _read(path)
    now = _narrowed(before, tuple(names))
    if now != before:
        _write(path, now)


def note_parting(folder: Path, parent: str, name: str, *, is_tail: bool = False) -> None:
    """Note that a block stands behind `parent`, if that is the last that an agent's sessions share.

    A tail is noted behind the last of those too: who names a folder may begin at a block's end. Raises
    OSError.
    """
    for path, one in _all(folder):
        ends = one.shared[-1:] + (one.behind[:1] if is_tail else ())
        if one.sessions >= _SEVERAL and parent in ends and one.behind[:1] != (name,):
            behind = (name, *(other for other in one.behind if other != name))
            _write(path, _Noted(one.sessions, one.shared, behind[:_BEHIND]))


def kept_names(root: Path) -> set[str]:
    """Names of all blocks below `root` that two sessions of an agent began with."""
    noted = map(_read, root.glob(f"*/*/{_FOLDER}/*"))
    return {name for one in noted if one.sessions >= _SEVERAL for name in one.shared}


def begun_with(folder: Path, agent: str, salt: str = "") -> tuple[str, ...]:
    """The blocks that sessions of `agent` begin with, in order; then those behind, the last first."""
    if not _AGENT.fullmatch(agent):
        return ()
    noted = _read(_path(folder, agent, salt))
    return noted.shared + noted.behind


def straddling(folder: Path, parent: str) -> tuple[str, ...]:
    """The blocks behind `parent` in which sessions part, if `parent` is the last that they share."""
    return next((one.behind for _, one in _all(folder) if one.shared[-1:] == (parent,)), ())


def _path(folder: Path, agent: str, salt: str) -> Path:
    digest = hashlib.blake2b(salt.encode(), digest_size=8).hexdigest()
    return folder / _FOLDER / (f"{agent}.{digest}" if salt else agent)


def _all(folder: Path) -> Iterator[tuple[Path, _Noted]]:
    try:
        files = os.listdir(folder / _FOLDER)
    except OSError:
        return
    for name in files:
        if _FILE.fullmatch(name):
            path = folder / _FOLDER / name
            yield path, _read(path)


def _narrowed(before: _Noted, names: tuple[str, ...]) -> _Noted:
    n = 0
    while n < min(len(before.shared), len(names)) and before.shared[n] == names[n]:
        n += 1
    if not n or n < _SAME_SHARE * len(before.shared):
        return _Noted(1, names)
    behind = before.behind if n == len(before.shared) else before.shared[n : n + 1]
    return _Noted(_SEVERAL, names[:n], behind)


def _read(path: Path) -> _Noted:
    try:
        with open(open_own(path), encoding="ascii") as file:
            head, _, behind = file.read().partition("\n\n")
        first, *names = head.split("\n")
        bytes.fromhex("".join([*names, *behind.split()]))  # raises ValueError for what is no name
        return _Noted(int(first), tuple(names), tuple(behind.split()))
    except (OSError, ValueError):
        return _Noted()


def _write(path: Path, noted: _Noted) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    text = "\n".join([str(noted.sessions), *noted.shared]) + "\n\n" + "\n".join(noted.behind)
    with new_file(path, 0o600) as file:
        file.write(text.encode("ascii"))
