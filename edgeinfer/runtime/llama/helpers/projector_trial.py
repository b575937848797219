"""Test whether a projector works with its model. Arguments: PROJECTOR MODEL…

Prints "" as JSON if it works, otherwise the reason. This is a separate process because an invalid
projector may crash it: of 300 projectors with damaged headers, 62 did.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from typing import Any

import msgspec

from edgeinfer.errors import DecodeError, EngineError
from edgeinfer.media.pictures import Picture
from edgeinfer.platform.machine import read_memory
from edgeinfer.runtime.llama.mtmd import Projector
from edgeinfer.runtime.llama.weights import open_model

#: CPU time (s) that the test of a projector may take.
_CPU_S = 600
#: Address space (bytes) allowed for libraries and threads, in addition to the free memory and the sizes
#: of the files. Most of it is never used.
_MAPPED_BYTES = 4 << 30
#: Width and height (pixels) of the picture that the test encodes.
_SIDE = 64
#: Width and height (pixels) of pictures that are tiled or scaled in different ways. The test does not
#: encode these pictures, it only tokenizes them.
_SIZES = ((2000, 2000), (4000, 20), (20, 4000), (1, 1))


def main(argv: list[str]) -> int:
    """Test projector `argv[0]` with the model files `argv[1:]`; write why it fails (or "") as JSON."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    most_bytes = read_memory().available_bytes + sum(map(os.path.getsize, argv)) + _MAPPED_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    try:
        reason = try_projector(argv[0], open_model(tuple(argv[1:])), os.cpu_count() or 1)
    except EngineError as error:
        reason = error.message
    sys.stdout.buffer.write(msgspec.json.encode(reason))
    sys.stdout.buffer.flush()
    os._exit(0)


def try_projector(path: str, model: Any, n_threads: int) -> str:
    """Encode a picture; return why the projector cannot do that, "" if it can."""
    try:
        projector = Projector(path, model, n_threads)
        for width, height in _SIZES:
            with contextlib.suppress(DecodeError):  # pictures of this size will be refused
                projector.chunks(width, height)
        projector.encode(Picture(_SIDE, _SIDE, bytes(3 * _SIDE * _SIDE)))
    except EngineError as error:
        return error.message
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
