"""Load one backend and print its devices. Argument: NAME ("cuda", "vulkan", or NVIDIA's driver).

Writes a `LoadedBackend` or a `MissingBackend` as a line of JSON. This is a separate process because
drivers may print, keep files open, or crash.
"""

from __future__ import annotations

import os
import sys

import msgspec

from edgeinfer.platform.process import die_with_parent
from edgeinfer.runtime.llama.backend_loading import load, load_driver
from edgeinfer.runtime.llama.backends import DRIVER


def main(argv: list[str]) -> int:
    """Load the backend; return 0 if a result was written."""
    die_with_parent()
    answer = msgspec.json.encode(load_driver() if argv[0] == DRIVER else load(argv[0]))
    sys.stdout.buffer.write(answer + b"\n")
    sys.stdout.buffer.flush()
    os._exit(0)  # without destructors, in which some drivers crash


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
