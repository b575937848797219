"""The last stages of building a shipped file: pack the tree that release.py made, write the file.

usage: finish.py WORK OUT

No program of the tree is executed, so the tree may be of another architecture (scripts/arm64/file.sh).
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import assemble  # noqa: E402  the two folders above come first
import bootloader  # noqa: E402
import pack  # noqa: E402

from edgeinfer import __version__  # noqa: E402

CRIU_PROGRAM = "criu/bin/criu"
#: Values of e_machine in an ELF file, with the names that `uname -m` prints.
_MACHINES = {62: "x86_64", 183: "aarch64"}


def finish(work: Path, out: Path) -> str:
    """Write the shipped file `out` from bootloader, tree and archive in `work`; return its sizes."""
    run, tree = work / "run", work / "tree"
    relocate = (CRIU_PROGRAM,) if (tree / CRIU_PROGRAM).exists() else ()
    (number,) = struct.unpack_from("<H", run.read_bytes(), 18)
    cache = bootloader.cache_dir() / "blocks"
    packed = pack.pack(tree, __version__, relocate, cache, machine=_MACHINES[number])
    assemble.assemble(run, packed.name, packed.data, work / "pyinstaller/first.pkg", out)
    sizes = f"{out.stat().st_size / 1e6:.1f} MB, {packed.raw_bytes / 1e6:.0f} MB unpacked"
    return f"{out}, {packed.name}, {sizes}"


if __name__ == "__main__":
    print(finish(Path(sys.argv[1]), Path(sys.argv[2])))
