"""What a pull or a quantization says while it works: plain values for whoever shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

Stage = Literal["resolving", "checking", "downloading", "verifying", "quantizing", "done"]


class PullProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a pull is. Bytes count within `file` (one of `n_files`); `total_bytes` is None while nobody knows it.

    `rate_bytes_per_s` and `left_s` are of the last seconds, not of the whole; None at the beginning. While quantizing,
    "bytes" are tensors.
    """

    stage: Stage
    file: str = ""
    index: int = 0
    n_files: int = 1
    done_bytes: int = 0
    total_bytes: int | None = None
    rate_bytes_per_s: float | None = None
    left_s: float | None = None
    note: str = ""


#: Called from the thread that pulls, often: be quick.
OnProgress = Callable[[PullProgress], None]
