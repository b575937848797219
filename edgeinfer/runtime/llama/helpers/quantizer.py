"""Run llama.cpp's quantizer in a separate process: `python -m` this module, JOB in JSON.

It writes a line of JSON to stdout for each tensor, `{"event": "progress", "done", "total"}`, and
finally `{"event": "done"}` or `{"event": "error", "kind", "message"}`. If a model file makes llama.cpp
abort, only this process ends.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from typing import Any

import msgspec
import numpy as np

from edgeinfer.platform.disk import free_bytes
from edgeinfer.platform.process import die_with_parent
from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.llama.helpers import say
from edgeinfer.runtime.llama.libllama import L

_TENSOR = re.compile(r"\[\s*(\d+)/\s*(\d+)\]\s+\S")
_SIZE = re.compile(r"quant size\s*=\s*([\d.]+) MiB")
_FAILED = re.compile(r"failed to quantize: (.*)")
#: Size (bytes) of the metadata beside the tensors: a generous estimate, small for any model.
_HEADER_BYTES = 64 << 20


class ImatrixSpan(msgspec.Struct, frozen=True, array_like=True):
    """A tensor's sums and counts in a checked matrix: byte offsets, numbers of float32."""

    name: str
    sums_offset: int
    n_sums: int
    counts_offset: int
    n_counts: int


class QuantizeJob(msgspec.Struct, frozen=True, kw_only=True):
    """A quantization to do. `ftype` is a llama_ftype."""

    source: str
    target: str
    ftype: int
    imatrix: str = ""
    spans: tuple[ImatrixSpan, ...] = ()


def main(argv: list[str]) -> int:
    """Quantize as `argv[0]` says; return 0 if the target is complete."""
    die_with_parent()
    job = msgspec.json.decode(argv[0], type=QuantizeJob)
    libllama.lib()  # load the backends before this log replaces theirs
    log = _Log()
    L.llama_log_set(log.callback, ctypes.c_void_p(0))
    failed = _run(job, _params(job, dry=True))
    planned = 0 if failed else log.planned_bytes()
    free = free_bytes(os.path.dirname(job.target))
    if planned + min(_HEADER_BYTES, os.path.getsize(job.source)) > free:
        return say(
            1, event="error", kind="no-room", message=f"{planned} bytes are needed, but {free} are free"
        )
    log.reports_progress = True
    params = _params(job)
    imatrix = _imatrix(job)
    if imatrix:
        params.imatrix = imatrix[0]
    if _run(job, params) != 0:
        return say(1, event="error", kind="refused", message=log.reason())
    return say(0, event="done")


class _Log:
    """llama.cpp's log, kept to explain a failure, and converted to progress if requested."""

    def __init__(self) -> None:
        self.reports_progress = False
        self._lines: list[str] = []
        self.callback = L.llama_log_callback(self._on_line)  # llama.cpp stores only the pointer

    def _on_line(self, _level: int, text: bytes, _data: object) -> None:
        line = text.decode("utf-8", "replace")
        self._lines.append(line)
        match = _TENSOR.search(line)
        if match and self.reports_progress:
            say(event="progress", done=int(match[1]), total=int(match[2]))

    def planned_bytes(self) -> int:
        """Return the result's size (bytes) as llama.cpp expects it; 0 if unknown."""
        match = _SIZE.search("".join(self._lines))
        return int(float(match[1]) * (1 << 20)) if match else 0

    def reason(self) -> str:
        match = _FAILED.search("".join(self._lines))
        return match[1].strip() if match else "llama.cpp gave no reason"


def _params(job: QuantizeJob, *, dry: bool = False) -> Any:
    params = L.llama_model_quantize_default_params()
    params.ftype = job.ftype
    params.nthread = len(os.sched_getaffinity(0))
    params.allow_requantize = True
    params.dry_run = dry
    return params


def _imatrix(job: QuantizeJob) -> list[Any]:
    if not job.spans:
        return []
    table = (L.llama_model_imatrix_data * (len(job.spans) + 1))()  # the empty last entry marks the end
    buffers: list[Any] = [table]
    for row, span in zip(table, job.spans, strict=False):
        sums = np.fromfile(job.imatrix, np.float32, span.n_sums, offset=span.sums_offset).reshape(
            span.n_counts, -1
        )
        counts = np.fromfile(job.imatrix, np.float32, span.n_counts, offset=span.counts_offset)[:, None]
        means = np.divide(sums, counts, out=np.ones_like(sums), where=counts > 0)
        row.name, row.size = span.name.encode(), means.size
        row.data = means.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        buffers.append(means)
    return buffers


def _run(job: QuantizeJob, params: Any) -> int:
    return int(L.llama_model_quantize(job.source.encode(), job.target.encode(), ctypes.byref(params)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
