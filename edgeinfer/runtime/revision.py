"""The revision of the engine and its kernels, as receipts name it."""

from __future__ import annotations

import os

#: Offset of the revision on arm64, where ggml's rotary positions and some types of rows are not shown
#: to equal x86-64's bit for bit: its receipts are checked exactly there, and within the tolerance
#: elsewhere.
_ARM64 = 1000 * (os.uname().machine == "aarch64")
#: Revision, which goes up by one whenever the same request can get other bits: after a change of
#: kernels, of sampling, or of llama.cpp. tests/runtime/test_revision.py fails if bits change and this
#: number does not.
KERNEL_REVISION = 2 + _ARM64
