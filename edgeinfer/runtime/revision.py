"""The number by which receipts tell whether two engines are bit-identical."""

from __future__ import annotations

import os

#: Added on arm64, where compilers fuse multiplications and additions of llama.cpp's samplers and of
#: some weight types. A receipt is checked exactly on the same architecture, otherwise with a tolerance.
_ARM64 = 1000 * (os.uname().machine == "aarch64")
#: Raise this number by one with each change of kernels, sampling or llama.cpp that changes bits of
#: answers. tests/runtime/test_revision.py fails if bits changed and this number did not.
KERNEL_REVISION = 3 + _ARM64
