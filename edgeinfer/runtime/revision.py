"""The revision of the engine and its kernels, for receipts."""

from __future__ import annotations

import os

#: Offset of the revision on arm64, where ggml's rotary positions and some row types may differ from
#: x86-64's bits. Receipts from arm64 are checked exactly only there, elsewhere with a tolerance.
_ARM64 = 1000 * (os.uname().machine == "aarch64")
#: Revision; raised by one whenever the same request can get different bits, after a change of kernels,
#: sampling or llama.cpp. tests/runtime/test_revision.py fails if bits change but this number does not.
KERNEL_REVISION = 2 + _ARM64
