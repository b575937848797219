"""The number by which receipts tell whether two engines are bit-identical."""

from __future__ import annotations

import os

#: Revisions on arm64 are larger by this number than those on x86-64: compilers for arm64 fuse
#: multiplications and additions in llama.cpp's samplers and for some weight types, so results differ
#: in their last bits.
_OF_ARM64 = 1000
#: Raise this number by one with each change of kernels, sampling or llama.cpp that changes bits of
#: answers. tests/runtime/test_revision.py fails if bits changed and this number did not.
KERNEL_REVISION = 3 + _OF_ARM64 * (os.uname().machine == "aarch64")


def is_newer(revision: int) -> bool:
    """Return whether another engine's number `revision` is newer than `KERNEL_REVISION`.

    Numbers of x86-64 and arm64 can be compared with each other. A number of an architecture that this
    program does not know counts as newer.
    """
    return revision % _OF_ARM64 > KERNEL_REVISION % _OF_ARM64 or revision >= 2 * _OF_ARM64
