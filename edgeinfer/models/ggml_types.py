"""ggml's tensor types and llama.cpp's file types, as numbers in files mean them.

Tables, because a header is checked before llama.cpp is imported; a test compares them with its own.
"""

from __future__ import annotations

import msgspec

from edgeinfer.errors import UsageError


class TensorType(msgspec.Struct, frozen=True):
    """A tensor type: `block` elements are stored in `bytes` bytes."""

    name: str
    block: int
    bytes: int


#: File types that count as unquantized: quantizing from any other loses quality twice.
FULL_PRECISION = frozenset({"F32", "F16", "BF16"})

#: ggml_type, name, elements in a block, bytes of a block. Missing numbers were removed from the format.
_TENSOR_TYPES = """
    0 F32 1 4          1 F16 1 2          2 Q4_0 32 18       3 Q4_1 32 20       6 Q5_0 32 22
    7 Q5_1 32 24       8 Q8_0 32 34       9 Q8_1 32 36       10 Q2_K 256 84     11 Q3_K 256 110
    12 Q4_K 256 144    13 Q5_K 256 176    14 Q6_K 256 210    15 Q8_K 256 292    16 IQ2_XXS 256 66
    17 IQ2_XS 256 74   18 IQ3_XXS 256 98  19 IQ1_S 256 50    20 IQ4_NL 32 18    21 IQ3_S 256 110
    22 IQ2_S 256 82    23 IQ4_XS 256 136  24 I8 1 1          25 I16 1 2         26 I32 1 4
    27 I64 1 8         28 F64 1 8         29 IQ1_M 256 56    30 BF16 1 2        34 TQ1_0 256 54
    35 TQ2_0 256 66    39 MXFP4 32 17     40 NVFP4 64 36     41 Q1_0 128 18     42 Q2_0 64 18
""".split()
#: ggml_type → TensorType.
TENSOR_TYPES: dict[int, TensorType] = {
    int(number): TensorType(name, int(block), int(size))
    for number, name, block, size in zip(*(_TENSOR_TYPES[i::4] for i in range(4)), strict=True)
}

_FROM_7 = """
    Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K IQ2_XXS IQ2_XS Q2_K_S
    IQ3_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M IQ4_XS IQ1_M BF16
"""
#: llama_ftype → the name people type. What llama.cpp can quantize to, in its order.
FILE_TYPES: dict[int, str] = {
    **dict(enumerate("F32 F16 Q4_0 Q4_1".split())),
    **dict(enumerate(_FROM_7.split(), 7)),
    **dict(enumerate("TQ1_0 TQ2_0 MXFP4_MOE NVFP4 Q1_0 Q2_0".split(), 36)),
}


def file_type(name: str) -> int | None:
    """Return the llama_ftype of `name` in any letter case, or None."""
    wanted = name.upper()
    return next((number for number, known in FILE_TYPES.items() if known == wanted), None)


def parse_file_type(name: str, context: str = "") -> int:
    """Return the llama_ftype of `name`. Raises UsageError, which names the `context` it was in."""
    number = file_type(name)
    if number is None:
        where = f" in {context!r}" if context else ""
        raise UsageError(
            f"{name!r}{where} is no quantization of llama.cpp's",
            hint="`edgeinfer quantize --help` lists them",
        )
    return number
