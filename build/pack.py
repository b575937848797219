"""Pack a folder into a payload (`edgeinfer.shipping.payload`): compressed blocks and an index.

Equal folders give equal bytes: names are sorted, and of a file only path, mode (0644 or 0755) and
content count.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import platform
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.shipping import payload

#: Maximum size (bytes) of a block of several files; a larger file is a block by itself. Large blocks
#: compress better, but two cores need enough blocks to share.
BLOCK_BYTES = 24 << 20


@dataclass(frozen=True)
class Packed:
    """A payload in memory, and the name of the application's folder, which depends on the index."""

    name: str
    data: bytes
    raw_bytes: int


def pack(
    tree: Path,
    version: str,
    relocate: tuple[str, ...],
    cache: Path,
    *,
    machine: str = platform.machine(),
) -> Packed:
    """Return the payload of `tree`, whose programs are for `machine` (a name that `uname -m` prints).

    Executables in `relocate` are packed without the interpreter's path. `cache` has compressed blocks.
    """
    files, links = _scan(tree)
    blocks = _group(tree, files)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        packed = list(pool.map(lambda block: _block(tree, block, relocate, cache, machine), blocks))
    entries = []
    spans = []
    offset = 0
    for number, (block, (data, sizes, digests)) in enumerate(zip(blocks, packed, strict=True)):
        for path, size, digest in zip(block, sizes, digests, strict=True):
            entries.append([path, _mode(tree / path), size, digest, number])
        spans.append([offset, len(data), sum(sizes)])
        offset += len(data)
    return _join(version, entries, links, spans, [data for data, _, _ in packed], relocate)


def _scan(tree: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """Return all files, and all links; a file that equals an earlier one becomes a link, too."""
    files: list[str] = []
    links: list[tuple[str, str]] = []
    first: dict[str, str] = {}
    for path in sorted(p for p in tree.rglob("*") if p.is_symlink() or p.is_file()):
        name = path.relative_to(tree).as_posix()
        if path.is_symlink():
            target = os.readlink(path)
            if target.startswith("/") or not (path.parent / target).resolve().is_relative_to(
                tree.resolve()
            ):
                raise SystemExit(f"error: {name} links to {target}, which is outside the application")
            links.append((name, target))
            continue
        digest = (
            hashlib.sha256(path.read_bytes()).hexdigest()
            if path.stat().st_size > payload.PAGE
            else name
        )
        if digest in first:  # wheels cannot contain links, so they have copies of libraries instead
            links.append((name, os.path.relpath(first[digest], os.path.dirname(name) or ".")))
        else:
            first[digest] = name
            files.append(name)
    return files, links


def _group(tree: Path, files: list[str]) -> list[list[str]]:
    """Group files, in their order, into blocks: first blocks of binaries, then of other files."""
    blocks: list[list[str]] = []
    for is_binary in (True, False):
        size = BLOCK_BYTES
        for name in files:
            if (".so" in name or name.endswith("-app")) != is_binary:
                continue
            length = (tree / name).stat().st_size
            if size + length > BLOCK_BYTES:
                blocks.append([])
                size = 0
            blocks[-1].append(name)
            size += length
    return blocks


def _mode(path: Path) -> int:
    return 0o755 if path.stat().st_mode & 0o100 else 0o644


def _block(
    tree: Path, block: list[str], relocate: tuple[str, ...], cache: Path, machine: str
) -> tuple[bytes, list[int], list[str]]:
    contents = [(tree / name).read_bytes() for name in block]
    contents = [
        payload.relocate(c, "") if n in relocate else c for n, c in zip(block, contents, strict=True)
    ]
    is_x86_code = machine == "x86_64" and any(".so" in name for name in block)
    data = _compress(b"".join(contents), cache, is_x86_code=is_x86_code)
    return data, [len(c) for c in contents], [hashlib.sha256(c).hexdigest() for c in contents]


def _compress(raw: bytes, cache: Path, *, is_x86_code: bool) -> bytes:
    """Compress `raw` as xz, or return it from the cache: xz takes 20 s of a build."""
    filters: list[dict[str, int]] = [
        {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": max(1 << 16, len(raw))}
    ]
    if is_x86_code:  # for arm64, Python's lzma has no such filter
        filters.insert(0, {"id": lzma.FILTER_X86})
    cached = cache / f"{hashlib.sha256(raw + repr(filters).encode()).hexdigest()}.xz"
    if cached.exists():
        return cached.read_bytes()
    # xz's own checksum is left out, because the index has SHA-256
    data = lzma.compress(raw, format=lzma.FORMAT_XZ, check=lzma.CHECK_NONE, filters=filters)
    cache.mkdir(parents=True, exist_ok=True)
    scratch = cached.with_name(f"{cached.name}.{os.getpid()}")
    scratch.write_bytes(data)
    os.replace(scratch, cached)
    return data


def _join(
    version: str,
    entries: list[list[object]],
    links: list[tuple[str, str]],
    spans: list[list[int]],
    data: list[bytes],
    relocate: tuple[str, ...],
) -> Packed:
    """Join index and blocks. Offsets depend on the index's length, so the index is made repeatedly."""
    start = 0
    for _ in range(8):
        document = {
            "version": version,
            "files": entries,
            "links": links,
            "blocks": [[offset + start, size, raw] for offset, size, raw in spans],
            "relocate": relocate,
        }
        index = json.dumps(document, separators=(",", ":"), sort_keys=True).encode()
        if start == 16 + len(index):
            break
        start = 16 + len(index)
    else:
        raise SystemExit("error: the length of the payload's index changes with each attempt")
    whole = struct.pack("<8sQ", payload.PAYLOAD_MAGIC, len(index)) + index + b"".join(data)
    return Packed(payload.folder_name(version, index), whole, sum(raw for _, _, raw in spans))
