"""Make a process that was parked on another machine, or in another home, one of this one.

Python keeps paths everywhere: `sys.path`, the modules' files, what was computed from them. A process
that is to be dumped again as a snapshot of this home goes through all of its objects once and writes
the new place wherever a path of the old one stands. What is immutable is made anew where it is held.
"""

from __future__ import annotations

import functools
import gc
import importlib
import types
from collections import deque
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import msgspec

from edgeinfer.errors import DumpError
from edgeinfer.runtime.llama.mappings import areas
from edgeinfer.snapshots import linux

#: Batches of objects whose referents are asked for at once.
_BATCH = 4096


class Places:
    """Old folders and files, and what they are called here; the longest old name counts."""

    def __init__(self, moved: dict[str, str]) -> None:
        pairs = sorted(moved.items(), key=lambda pair: len(pair[0]), reverse=True)
        self.pairs = [(old, new) for old, new in pairs if old and old != new]

    def __bool__(self) -> bool:
        return bool(self.pairs)

    def of(self, path: str) -> str:
        """Return the path as it is here; any other text unchanged."""
        for old, new in self.pairs:
            if path.startswith(old) and path[len(old) : len(old) + 1] in ("", "/"):
                return new + path[len(old) :]
        return path

    def value(self, value: Any) -> Any:
        """Return the value with paths of here; `value` itself if there is none in it."""
        kind = type(value)
        if kind is str:
            return self.of(value) if value[:1] == "/" else value
        if kind is bytes:
            return self._bytes(value) if value[:1] == b"/" else value
        if isinstance(value, PurePath):
            text = str(value)
            there = self.of(text)
            return value if there is text or there == text else kind(there)
        if isinstance(value, tuple):
            return self._tuple(value)
        if kind is frozenset:
            items = frozenset(map(self.value, value))
            return value if items == value else items
        return value

    def _bytes(self, value: bytes) -> bytes:
        text = value.decode("utf-8", "surrogateescape")
        there = self.of(text)
        return value if there == text else there.encode("utf-8", "surrogateescape")

    def _tuple(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        items = [self.value(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)._make(items) if hasattr(value, "_make") else tuple(items)


def relocate(moved: dict[str, str]) -> None:
    """Write the new paths into every object of this process; code's file names stay, for tracebacks.

    Raises DumpError naming the kinds of objects where an old path could not be replaced.
    """
    places = Places(moved)
    gc.unfreeze()
    if places:
        holders = _holders(places)
        for holder in holders:
            _rewrite(holder, places)
        left = {
            _kind(one) for one in holders if _holds(one, places) and not isinstance(one, _MADE_ANEW)
        }
        if left:
            raise DumpError(f"paths of its old place stay in {', '.join(sorted(left))}")
    importlib.invalidate_caches()


def own_pages(path: str) -> None:
    """Privatise every page of this process's private file mappings, for a dump. Raises OSError."""
    for area in list(areas()):
        if area.path == path and area.permissions.endswith("p"):
            linux.own_pages(area.low, area.high - area.low, area.permissions)


def _holders(places: Places) -> list[Any]:
    found: list[Any] = []
    waiting: list[Any] = gc.get_objects()
    seen = set(map(id, waiting))
    ours = {id(one) for one in (places, vars(places), places.pairs, *places.pairs)}
    while waiting:
        batch, waiting = waiting[:_BATCH], waiting[_BATCH:]
        further = []
        for one in batch:
            if id(one) in ours:
                continue
            if _holds(one, places):
                found.append(one)
            further += [r for r in gc.get_referents(one) if not gc.is_tracked(r)]
        for one in further:
            if id(one) not in seen and type(one) not in _PLAIN:
                seen.add(id(one))
                waiting.append(one)
    return found


def _holds(holder: Any, places: Places) -> bool:
    held = gc.get_referents(holder)
    if isinstance(holder, dict):
        held += dict.keys(holder)  # a dict whose keys are all texts tells the collector its values only
    return any(places.value(one) is not one for one in held)


def _kind(one: Any) -> str:
    return f"{type(one).__module__}.{type(one).__qualname__}"


#: What cannot be changed: whatever holds one gets another.
_MADE_ANEW = (tuple, frozenset, PurePath)
_PLAIN = (str, bytes, int, float, bool, complex, type(None), type(Ellipsis))
_Rewriter = Callable[[Any, Places], None]


def _rewrite(holder: Any, places: Places) -> None:
    for kinds, rewrite in _REWRITERS:
        if isinstance(holder, kinds):
            rewrite(holder, places)
            return
    _attributes(holder, places)


def _dict(holder: dict[Any, Any], places: Places) -> None:
    for key, value in list(holder.items()):
        there, new = places.value(key), places.value(value)
        if there is not key:
            del holder[key]
            holder[there] = new
        elif new is not value:
            holder[key] = new


def _list(holder: Any, places: Places) -> None:
    for at, value in enumerate(holder):
        new = places.value(value)
        if new is not value:
            holder[at] = new


def _set(holder: set[Any], places: Places) -> None:
    for value in list(holder):
        new = places.value(value)
        if new is not value:
            holder.discard(value)
            holder.add(new)


def _leave(_holder: Any, _places: Places) -> None:
    pass


def _function(holder: types.FunctionType, places: Places) -> None:
    if holder.__defaults__:
        holder.__defaults__ = places.value(holder.__defaults__)


def _cell(holder: types.CellType, places: Places) -> None:
    holder.cell_contents = places.value(holder.cell_contents)


def _cached(holder: Any, _places: Places) -> None:
    holder.cache_clear()


def _struct(holder: msgspec.Struct, places: Places) -> None:
    for name in holder.__struct_fields__:
        value = getattr(holder, name)
        new = places.value(value)
        if new is not value:
            msgspec.structs.force_setattr(holder, name, new)


def _class(holder: type, places: Places) -> None:
    for name, value in list(vars(holder).items()):
        new = places.value(value)
        if new is not value:
            type.__setattr__(holder, name, new)


def _attributes(holder: Any, places: Places) -> None:
    for name, value in list(getattr(holder, "__dict__", {}).items()):
        new = places.value(value)
        if new is not value:
            object.__setattr__(holder, name, new)
    for kind in type(holder).__mro__:
        for slot in list(vars(kind).values()):
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    value = slot.__get__(holder)
                except AttributeError:  # not set
                    continue
                new = places.value(value)
                if new is not value:
                    slot.__set__(holder, new)


_REWRITERS: list[tuple[Any, _Rewriter]] = [
    (dict, _dict),
    ((list, deque), _list),
    (set, _set),
    (_MADE_ANEW, _leave),
    (types.FunctionType, _function),
    (types.CellType, _cell),
    (functools._lru_cache_wrapper, _cached),
    (msgspec.Struct, _struct),
    (type, _class),
]
