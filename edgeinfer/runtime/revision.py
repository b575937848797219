"""The revision of the engine and its kernels, as receipts name it."""

from __future__ import annotations

#: Goes up by one whenever the same request can get other bits: after a change of kernels, of sampling,
#: or of llama.cpp. tests/runtime/test_revision.py fails if bits change and this number does not.
KERNEL_REVISION = 2
