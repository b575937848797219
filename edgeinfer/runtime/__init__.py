"""The engine: the only room that imports llama_cpp. Knows no HTTP and no terminal.

The one thing in this project that happens at import: libgomp reads its spin count from the environment
when it is mapped, which any module here that imports llama_cpp brings about. Its default spins for
about a millisecond at every barrier, which starves ggml's own threads as soon as anything else runs
(docs/decisions/002-spin-count.md).
"""

from os import environ

SPIN_COUNT = "GOMP_SPINCOUNT"
environ.setdefault(SPIN_COUNT, "1000")
