// Vectors of one register: a float, an integer or a dword (four bytes of weights) per lane. Code that differs between
// instruction sets is in one file per level; each file defines the constants and functions that level_v4.h documents.
#pragma once
#include <cstdint>
#include <cstring>

#include "hook.h"

#define UNROLL _Pragma("GCC unroll 8")  // completely unrolls loops of up to eight rounds

namespace {

#if defined(__AVX512VNNI__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef uint32_t Dwords __attribute__((vector_size(4 * kLanes)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int8_t Table __attribute__((vector_size(16)));

// Orders of a block's bytes in vectors: kDwords, a dword of each row; kArranged, the same after arrange(); kRows, 16 bytes of each
// fourth row, which need no transposing; kSpans, a dword of each lane, to be multiplied with the activations of that lane.
enum class Order { kDwords, kArranged, kRows, kSpans };

template <class T> INLINE T load(const void *p) {
    T v;
    memcpy(&v, p, sizeof v);
    return v;
}
template <class T> INLINE void store(void *p, T v) { memcpy(p, &v, sizeof v); }
INLINE Floats floats(Integers x) { return __builtin_convertvector(x, Floats); }
INLINE Floats floats(Dwords x) { return __builtin_convertvector((Integers)x, Floats); }
INLINE Integers all(int32_t x) { return Integers{} + x; }
INLINE Floats all(float x) { return x - Floats{}; }  // not x + 0, which the compiler must compute, because it turns -0 into 0
INLINE Dwords broadcast(const int8_t *x) { return (Dwords)all(load<int32_t>(x)); }

}  // namespace

#if defined(__AVX512VNNI__)
#include "level_v4.h"
#elif defined(__AVX2__)
#include "level_v3.h"
#else
#include "level_neon.h"
#endif

namespace {

INLINE Floats load(const float *p) { return load<Floats>(p); }
INLINE Floats load(const ggml_fp16_t *p) { return from_halves(p); }
INLINE Floats load(const ggml_bf16_t *p) { return from_bf16(p); }

constexpr int kSums = 16, kParts = kSums / kLanes;  // partial sums of a row, on every level; they are added as a tree
typedef float Four __attribute__((vector_size(16)));
INLINE Four four_of(const Floats (&sums)[kParts]) {
    Four x[4];
    memcpy(x, sums, sizeof x);
    return (x[0] + x[2]) + (x[1] + x[3]);
}
INLINE float tree(const Floats (&sums)[kParts]) {
    const Four four = four_of(sums);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

}  // namespace
