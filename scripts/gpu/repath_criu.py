"""Make FOLDER/bin/criu use the ld.so in FOLDER/lib: `repath_criu.py FOLDER`.

An ELF interpreter is an absolute path; scripts/fetch_criu.sh pads the path with leading slashes, so
that the path of another folder fits in its place.
"""

import sys
from pathlib import Path

_LOADER = b"/lib/ld-linux-x86-64.so.2"


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    program = folder / "bin/criu"
    data = program.read_bytes()
    stop = data.index(_LOADER + b"\0") + len(_LOADER)
    start = data.rindex(b"\0", 0, stop) + 1
    path = bytes(folder) + _LOADER
    if not data[start:stop].startswith(b"//") or len(path) > stop - start:
        sys.exit(f"{program}: the path {path.decode()} does not fit into the ELF interpreter")
    program.write_bytes(data[:start] + path.rjust(stop - start, b"/") + data[stop:])


if __name__ == "__main__":
    main()
