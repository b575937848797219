"""scripts/one_variant.py chooses the CPU variant that ggml would, and leaves it alone in the source."""

import one_variant
import pytest

CMAKE = """
    if (GGML_SYSTEM_ARCH STREQUAL "x86")
        ggml_add_cpu_backend_variant(x64)
        ggml_add_cpu_backend_variant(haswell            SSE42 AVX F16C FMA AVX2 BMI2)
        ggml_add_cpu_backend_variant(skylakex           SSE42 AVX F16C FMA AVX2 BMI2 AVX512)
        if (CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
            ggml_add_cpu_backend_variant(zen4           SSE42 AVX F16C FMA AVX2 BMI2 AVX512 AVX512_VBMI AVX512_VNNI AVX512_BF16)
        endif()
    elseif(GGML_SYSTEM_ARCH STREQUAL "ARM")
        ggml_add_cpu_backend_variant(armv8.0_1)
        ggml_add_cpu_backend_variant(armv8.2_1    DOTPROD)
        ggml_add_cpu_backend_variant(armv8.6_1    DOTPROD FP16_VECTOR_ARITHMETIC SVE MATMUL_INT8)
        ggml_add_cpu_backend_variant(armv9.2_1    DOTPROD FP16_VECTOR_ARITHMETIC SVE MATMUL_INT8 SME)
        ggml_add_cpu_backend_variant(apple_m1     DOTPROD)
"""
AVX2 = "sse4_2 avx f16c fma avx2 bmi2"
AVX512 = f"{AVX2} avx512f avx512cd avx512vl avx512dq avx512bw"


@pytest.mark.parametrize(
    ("flags", "variant"),
    [
        ("", "x64"),
        ("sse4_2 avx", "x64"),
        (AVX2, "haswell"),
        (AVX512.replace("avx512bw", ""), "haswell"),
        (AVX512, "skylakex"),
        (f"{AVX512} avx512vbmi avx512_vnni avx512_bf16", "zen4"),
    ],
)
def test_best_variant_that_runs_is_chosen(flags, variant):
    assert one_variant.choose(CMAKE, set(flags.split()), "x86_64") == variant


@pytest.mark.parametrize(
    ("flags", "variant"),
    [
        ("asimd", "armv8.0_1"),
        ("asimd asimdhp asimddp", "armv8.2_1"),
        ("asimd asimdhp asimddp sve i8mm sme", "armv8.6_1"),
    ],
)
def test_best_variant_of_arm64_is_chosen_without_sme(flags, variant):
    assert one_variant.choose(CMAKE, set(flags.split()), "aarch64") == variant


def test_other_variants_leave_the_source_and_its_conditions_stay():
    source = one_variant.keep_only(CMAKE, "zen4")
    assert [name for name, _ in one_variant.VARIANT.findall(source)] == ["zen4"]
    assert source.count("if (") == 2
