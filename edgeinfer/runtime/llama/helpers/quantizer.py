"""Run llama.cpp's quantizer in a separate process, which a bad model file may crash.

The argument is a `QuantizeJob` as JSON. Writes a line of JSON for each tensor, `{"event": "progress",
"done", "total"}`, and finally `{"event": "done"}` or `{"event": "error", "kind", "message"}`.
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
from edgeinfer.runtime.llama.helpers import report
from edgeinfer.runtime.llama.libllama import L

_TENSOR = re.compile(r"\[\s*(\d+)/\s*(\d+)\]\s+\S")
_SIZE = re.compile(r"quant size\s*=\s*([\d.]+) MiB")
_FAILED = re.compile(r"failed to quantize: (.*)")
#: Maximum disk space (bytes) that is reserved for the metadata of the quantized file.
_HEADER_BYTES = 64 << 20


class ImatrixSpan(msgspec.Struct, frozen=True, array_like=True):
    """Where an imatrix file has a tensor's sums and counts: offsets (bytes), numbers of float32."""

    name: str
    sums_offset: int
    n_sums: int
    counts_offset: int
    n_counts: int


class QuantizeJob(msgspec.Struct, frozen=True, kw_only=True):
    """A quantization of the file `source` to `target`. `ftype` is a llama_ftype.

    `imatrix` is the file of an importance matrix, `spans` are the tensors in it.
    """

    source: str
    target: str
    ftype: int
    imatrix: str = ""
    spans: tuple[ImatrixSpan, ...] = ()


def main(argv: list[str]) -> int:
    """Quantize as `argv[0]`, a `QuantizeJob` in JSON, says; return 0 on success, otherwise 1."""
    die_with_parent()
    job = msgspec.json.decode(argv[0], type=QuantizeJob)
    libllama.lib()  # before `_Log`, because `lib` sets a log callback, too
    log = _Log()
    L.llama_log_set(log.callback, ctypes.c_void_p(0))
    failed = _run(job, _params(job, dry=True))
    planned = 0 if failed else log.planned_bytes()
    free = free_bytes(os.path.dirname(job.target))
    if planned + min(_HEADER_BYTES, os.path.getsize(job.source)) > free:
        return report(
            1, event="error", kind="no-room", message=f"{planned} bytes are needed, but {free} are free"
        )
    log.reports_progress = True
    params = _params(job)
    imatrix = _imatrix(job)
    if imatrix:
        params.imatrix = imatrix[0]
    if _run(job, params) != 0:
        return report(1, event="error", kind="refused", message=log.reason())
    return report(0, event="done")


class _Log:
    """Receives llama.cpp's log, and reports progress from it if `reports_progress` is set."""

    def __init__(self) -> None:
        self.reports_progress = False
        self._lines: list[str] = []
        self.callback = L.llama_log_callback(self._on_line)  # llama.cpp stores only a pointer to it

    def _on_line(self, _level: int, text: bytes, _data: object) -> None:
        line = text.decode("utf-8", "replace")
        self._lines.append(line)
        match = _TENSOR.search(line)
        if match and self.reports_progress:
            report(event="progress", done=int(match[1]), total=int(match[2]))

    def planned_bytes(self) -> int:
        """Return the size of the target (bytes) that a dry run has logged, 0 if none."""
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
