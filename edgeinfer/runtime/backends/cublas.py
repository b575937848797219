"""Find cuBLAS, which the CUDA backend opens at its first use (tools/cublas.c) and may never need."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

#: The variable that names the library to the CUDA backend.
VARIABLE = "EDGEINFER_CUBLAS"
LIBRARY = "libcublas.so.13"
_SYSTEM = (
    "/usr/local/cuda/lib64",
    "/usr/local/cuda-13/lib64",
    "/opt/cuda/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
)


def prepare(backend: str) -> str:
    """Name cuBLAS to the backend library of that path; returns a warning where it is nowhere."""
    found = next((path for path in _candidates(backend) if os.path.isfile(path)), None)
    if found is None:
        return (
            f"cuBLAS 13 is not here ({LIBRARY}): models with F16, BF16 or F32 weights may stop at it; "
            "pip install nvidia-cublas, or NVIDIA's package"
        )
    os.environ[VARIABLE] = found
    return ""


def _candidates(backend: str) -> Iterator[str]:
    if os.environ.get(VARIABLE):
        yield os.environ[VARIABLE]
    folders = [os.path.dirname(backend), *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    wheels = importlib.util.find_spec("nvidia")  # a namespace that NVIDIA's wheels share
    folders += [f"{place}/cu13/lib" for place in (wheels and wheels.submodule_search_locations) or ()]
    for folder in (*folders, *_SYSTEM):
        if folder:
            yield os.path.join(folder, LIBRARY)
