"""Load one backend library and print the result: `python -m` this module, NAME.

Writes a `LoadedBackend` or a `MissingBackend` as one JSON line. It is a separate process, because a
driver may print, keep open files, or crash.
"""

from __future__ import annotations

import os
import sys

import msgspec

from edgeinfer.platform.process import die_with_parent
from edgeinfer.runtime.llama.backend_loading import load


def main(argv: list[str]) -> int:
    """Load the backend; return 0 if a result was written."""
    die_with_parent()
    answer = msgspec.json.encode(load(argv[0]))
    sys.stdout.buffer.write(answer + b"\n")
    sys.stdout.buffer.flush()
    os._exit(0)  # some drivers crash in their destructors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
