"""Bake a dump: rewrite CRIU's images so that a restore maps memory instead of reading it.

CRIU writes a process's private memory to one file of pages. A restore would read all of it into
anonymous memory: 0.75 to 0.95 s per GB. Here that file becomes `memory.img`, and in CRIU's description
of the address space every long run of pages becomes a private mapping of `memory.img`. Then a restore
reads no pages: the kernel takes a page from the page cache when it is touched, and processes resumed
from one snapshot share all pages that they do not write.

The process was frozen while CRIU wrote, so the file has the process's whole memory at one moment,
including Python's heap and the threads' stacks (docs/decisions/040-bake-the-images.md).

CRIU still reads the runs that are too short for a mapping, and the areas that cannot be mapped (stack,
vDSO). Pages of zeros become anonymous memory again, so an empty KV cache takes no disk space.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from edgeinfer.errors import DumpError
from edgeinfer.runtime.llama.mappings import Range
from edgeinfer.snapshots.builder import criu_images
from edgeinfer.snapshots.builder.criu_images import ImageMessage

PAGE = mmap.PAGESIZE
#: Size (bytes) from which a run of memory pages is mapped from `memory.img`. CRIU reads a shorter run
#: as fast as it would map one.
SHORTEST_RUN_BYTES = 64 << 10
#: Size (bytes) of a block of `memory.img`. A block that contains only zeros becomes a hole in the file.
BLOCK_BYTES = 64 << 10
_READ_BYTES = 4 << 20
_MODE = 0o100600
_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


class Run(NamedTuple):
    """Consecutive pages in a dump. `start` is an address in memory, `length` is in bytes.

    `offset` is their position in the dump's file of pages, `flags` are CRIU's flags for these pages.
    """

    start: int
    length: int
    offset: int
    flags: int

    @property
    def end(self) -> int:
        return self.start + self.length

    def cut(self, start: int, end: int) -> Run:
        return Run(start, end - start, self.offset + start - self.start, self.flags)


class BakeResult(NamedTuple):
    """Sizes of a baked dump: `memory_bytes` is that of `memory.img`, `disk_bytes` without its holes.

    `left_bytes` is the size of the pages that CRIU itself restores, `mappings` the number of memory
    areas in the rewritten images.
    """

    memory_bytes: int
    disk_bytes: int
    left_bytes: int
    mappings: int


def bake(folder: Path, memory: Path, pid: int, progress: Callable[[float], None]) -> BakeResult:
    """Rewrite the dump of process `pid` in `folder`, so that a restore maps its pages.

    The pages are moved to the new file `memory`. `progress` gets the finished fraction, 0 to 1. Raises
    DumpError if CRIU's images have an unknown structure, OSError if the disk is full.
    """
    pages = folder / "pages-1.img"
    runs = _runs(folder / f"pagemap-{pid}.img", pages.stat().st_size)
    pages.rename(memory)
    memory.chmod(0o600)
    zeros = _scan(memory, progress)
    _Baker(folder, memory, pid, runs, zeros).write()
    for core in folder.glob("core-*.img"):
        _forget_scheduling(core)
    info = memory.stat()
    areas = criu_images.read(folder / f"mm-{pid}.img").messages[0].parts(criu_images.MM_AREAS)
    return BakeResult(info.st_size, info.st_blocks * 512, pages.stat().st_size, len(areas))


def _runs(pagemap: Path, pages_bytes: int) -> list[Run]:
    """Return the runs of pages that CRIU wrote, in file order; adjacent ones are joined."""
    runs: list[Run] = []
    offset = 0
    for entry in criu_images.read(pagemap).messages[1:]:
        start, flags = entry.number(criu_images.RUN_ADDRESS), entry.number(criu_images.RUN_FLAGS)
        n_pages = entry.number(criu_images.RUN_PAGES) or entry.number(criu_images.RUN_PAGES32)
        length = n_pages * PAGE
        if runs and runs[-1].end == start and runs[-1].flags == flags:
            runs[-1] = runs[-1]._replace(length=runs[-1].length + length)
        else:
            runs.append(Run(start, length, offset, flags))
        offset += length
    if offset != pages_bytes:
        sizes = f"its list of pages has {offset} bytes, its file of pages {pages_bytes}"
        raise DumpError(f"CRIU's dump is incomplete: {sizes}")
    return runs


def _scan(memory: Path, progress: Callable[[float], None]) -> list[Range]:
    """Replace blocks of zeros in the file by holes; return the holes (start, end) in order."""
    zero = bytes(BLOCK_BYTES)
    zeros: list[Range] = []
    size = memory.stat().st_size
    with open(memory, "r+b", buffering=0) as file:
        for start in range(0, size, _READ_BYTES):
            chunk = os.pread(file.fileno(), _READ_BYTES, start)
            for block in range(0, len(chunk) - BLOCK_BYTES + 1, BLOCK_BYTES):
                if chunk[block : block + BLOCK_BYTES] == zero:
                    begin = start + block
                    if zeros and zeros[-1].high == begin:
                        begin = zeros.pop().low
                    zeros.append(Range(begin, start + block + BLOCK_BYTES))
            progress((start + len(chunk)) / size)
        fallocate = ctypes.CDLL(None).fallocate  # a failed call costs only disk space
        for begin, stop in zeros:
            fallocate(file.fileno(), _PUNCH_HOLE, ctypes.c_long(begin), ctypes.c_long(stop - begin))
    return zeros


def _forget_scheduling(core: Path) -> None:
    """Remove niceness and scheduling policy, so that a resumed process gets those of its launcher."""
    image = criu_images.read(core)
    removed = (criu_images.THREAD_NICE, criu_images.THREAD_POLICY, criu_images.THREAD_PRIORITY)
    threads = [
        ImageMessage(field for field in thread if field.number not in removed)
        for thread in image.messages[0].parts(criu_images.CORE_THREAD)
    ]
    image.messages[0] = image.messages[0].with_parts(criu_images.CORE_THREAD, threads)
    criu_images.write(core, image)


class _Baker:
    """Rewrites the images of one dump: `write` maps the long runs and leaves the others to CRIU."""

    def __init__(
        self, folder: Path, memory: Path, pid: int, runs: list[Run], zeros: list[Range]
    ) -> None:
        self._folder = folder
        self._memory = memory
        self._pid = pid
        self._runs = runs
        self._content = [piece for run in runs for piece in _without_zeros(run, zeros)]
        self._unmapped: list[Run] = []
        self._file_id = 0

    def write(self) -> None:
        self._write_files()
        self._write_areas()
        self._write_unmapped()

    def _write_files(self) -> None:
        path = self._folder / "files.img"
        image = criu_images.read(path)
        self._file_id = 1 + max(file.number(criu_images.FILE_ID) for file in image.messages)
        owner = ImageMessage.of(dict.fromkeys(range(1, 6), 0))
        regular = ImageMessage.of(
            {
                criu_images.REG_ID: self._file_id,
                criu_images.REG_FLAGS: os.O_RDONLY,
                criu_images.REG_POS: 0,
                criu_images.REG_OWNER: owner.encode(),
                criu_images.REG_NAME: os.fsencode(self._memory),
                criu_images.REG_SIZE: self._memory.stat().st_size,
                criu_images.REG_MODE: _MODE,
            }
        )
        entry = {criu_images.FILE_TYPE: criu_images.REGULAR_FILE, criu_images.FILE_ID: self._file_id}
        image.messages.insert(0, ImageMessage.of({**entry, criu_images.FILE_REG: regular.encode()}))
        criu_images.write(path, image)

    def _write_areas(self) -> None:
        """Split the memory areas at the long runs, which become mappings of `memory.img`."""
        path = self._folder / f"mm-{self._pid}.img"
        image = criu_images.read(path)
        areas = image.messages[0].parts(criu_images.MM_AREAS)
        pieces = (piece for area in areas for piece in self._cut(area))
        image.messages[0] = image.messages[0].with_parts(criu_images.MM_AREAS, pieces)
        criu_images.write(path, image)

    def _cut(self, area: ImageMessage) -> Iterator[ImageMessage]:
        start, end = area.number(criu_images.AREA_START), area.number(criu_images.AREA_END)
        status = area.number(criu_images.AREA_STATUS)
        # leave pages of zeros out of anonymous memory only: in a private mapping of a file, the content
        # of the file would replace them
        runs = self._content if status & criu_images.STATUS_ANON_PRIVATE else self._runs
        shortest = SHORTEST_RUN_BYTES if _may_be_mapped(area) else end
        address = start
        for run in runs:
            if run.end <= start or run.start >= end:
                continue
            piece = run.cut(max(run.start, start), min(run.end, end))
            if piece.length < shortest:
                self._unmapped.append(piece)
                continue
            if address < piece.start:
                yield _piece(area, address, piece.start)
            yield self._mapping(area, piece)
            address = piece.end
        if address < end:
            yield area if address == start else _piece(area, address, end)

    def _mapping(self, area: ImageMessage, run: Run) -> ImageMessage:
        status, flags = area.number(criu_images.AREA_STATUS), area.number(criu_images.AREA_FLAGS)
        return area.with_values(
            {
                criu_images.AREA_START: run.start,
                criu_images.AREA_END: run.end,
                criu_images.AREA_OFFSET: run.offset,
                criu_images.AREA_FILE: self._file_id,
                criu_images.AREA_FLAGS: flags & ~criu_images.MAP_ANONYMOUS | criu_images.MAP_PRIVATE,
                criu_images.AREA_STATUS: status & ~criu_images.STATUS_ANON_PRIVATE
                | criu_images.STATUS_FILE_PRIVATE,
                criu_images.AREA_OPEN_FLAGS: os.O_RDONLY,
            }
        )

    def _write_unmapped(self) -> None:
        """Write the pagemap and the pages of all runs that are not mapped, for CRIU to read."""
        pagemap = self._folder / f"pagemap-{self._pid}.img"
        image = criu_images.read(pagemap)
        remaining = sorted(self._unmapped)
        with open(self._memory, "rb") as memory, open(self._folder / "pages-1.img", "wb") as pages:
            for run in remaining:
                pages.write(os.pread(memory.fileno(), run.length, run.offset))
        image.messages[1:] = map(_pagemap_entry, remaining)
        criu_images.write(pagemap, image)


def _may_be_mapped(area: ImageMessage) -> bool:
    status, flags = area.number(criu_images.AREA_STATUS), area.number(criu_images.AREA_FLAGS)
    private = criu_images.STATUS_ANON_PRIVATE | criu_images.STATUS_FILE_PRIVATE
    return bool(
        status & criu_images.STATUS_REGULAR
        and status & private
        and not status & criu_images.STATUS_VDSO
        and not flags & criu_images.MAP_GROWSDOWN
    )


def _piece(area: ImageMessage, start: int, end: int) -> ImageMessage:
    offset = area.number(criu_images.AREA_OFFSET)
    if area.number(criu_images.AREA_STATUS) & criu_images.STATUS_FILE_PRIVATE:
        offset += start - area.number(criu_images.AREA_START)
    return area.with_values(
        {criu_images.AREA_START: start, criu_images.AREA_END: end, criu_images.AREA_OFFSET: offset}
    )


def _pagemap_entry(run: Run) -> ImageMessage:
    pages = {criu_images.RUN_ADDRESS: run.start, criu_images.RUN_PAGES32: run.length // PAGE}
    return ImageMessage.of({**pages, criu_images.RUN_FLAGS: run.flags})


def _without_zeros(run: Run, zeros: list[Range]) -> Iterator[Run]:
    start = run.offset
    for begin, stop in zeros:
        if stop <= start or begin >= run.offset + run.length:
            continue
        if begin > start:
            yield run.cut(run.start + start - run.offset, run.start + begin - run.offset)
        start = stop
    if start < run.offset + run.length:
        yield run.cut(run.start + start - run.offset, run.end)
