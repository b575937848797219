// Vectors of one register: a float, an integer or a dword (four bytes of weights) per lane. Code that differs between
// instruction sets is in one file per level; each file defines the constants and functions that level_v4.h documents.
#pragma once
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdint>
#include <cstring>

#include "hook.h"

#define UNROLL _Pragma("GCC unroll 8")  // completely unrolls loops of up to eight rounds

// Whether products with few columns, and attention, prefetch from memory to the L1 cache; otherwise to L2. On Zen 5, reads from L2
// wait for the prefetches. Zen 4 can have more prefetches to L2 in flight: it reads 29 GB/s instead of 19 with one column of Q4_K, and
// one answer of a model of 135M after 1,800 tokens is 1.1 times as fast. No other processor was measured.
#if defined(__x86_64__)
inline bool is_zen5_or_later() {
    unsigned version = 0, vendor = 0, b, c, d;
    __get_cpuid(0, &version, &b, &vendor, &d), __get_cpuid(1, &version, &b, &c, &d);
    return vendor == signature_AMD_ecx && (version >> 8 & 15) + (version >> 20 & 255) >= 26;
}
inline const bool g_prefetches_to_l1 = is_zen5_or_later();
#else
inline constexpr bool g_prefetches_to_l1 = true;
#endif

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
// kLocality as in __builtin_prefetch: 0 and 3 to L1, 2 to L2. As a loop: unrolled prefetches would be spread over the code that follows.
template <int kLocality> INLINE void prefetch_lines(const void *p, int bytes) {
#pragma GCC unroll 1
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)p + i, 0, kLocality);
}
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
