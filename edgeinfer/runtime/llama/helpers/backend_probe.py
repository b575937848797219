"""Load one backend and print its devices. Argument: NAME ("cuda", "vulkan", or NVIDIA's driver).

Prints a `LoadedBackend` or a `MissingBackend` as JSON. This is a separate process because drivers may
print, keep files open, start other processes, or crash.
"""

from __future__ import annotations

import os
import sys

import msgspec

from edgeinfer.runtime.llama.backend_loading import check_driver, load
from edgeinfer.runtime.llama.backends import DRIVER
from edgeinfer.runtime.llama.helpers import take_stdout


def main(argv: list[str]) -> int:
    """Load the backend `argv[0]`, write the outcome to stdout as JSON, and exit with status 0."""
    answer_file = take_stdout()
    answer_file.write(msgspec.json.encode(check_driver() if argv[0] == DRIVER else load(argv[0])))
    os._exit(0)  # without destructors, in which some drivers crash


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
