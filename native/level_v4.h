// AVX-512 with VNNI.
#include <immintrin.h>

namespace {

// Numbers of columns (rows of a batch). For up to kFew columns, weights are unpacked in registers, for at most kColumns columns at a
// time. For more columns, weights are unpacked to a slab, with which kTile columns are multiplied at a time.
constexpr int kFew = 6, kColumns = 8, kTile = 6;
constexpr bool kSignedBytes = false;  // whether add_dots() takes 8-bit weights as int8, not uint8
constexpr bool kSaturates = false;    // whether add_dots() must know the largest weight, because its 16-bit sums saturate
constexpr bool kGathers = false;      // whether a block's scale (f16) is read separately from its weights
constexpr bool kDotsOfRows = false;   // whether one column is multiplied with weights in Order::kRows
constexpr int kSpansAhead = 10240;    // if lanes are spans of weights: prefetches are so many bytes before the reads; 0: lanes never are
constexpr int kRegisters = 32;

INLINE Floats fma(Floats a, Floats b, Floats c) { return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE Floats larger(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }  // returns b if either is NaN
INLINE Floats smaller(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE Integers nearest(Floats x) { return (Integers)_mm512_cvtps_epi32((__m512)x); }
INLINE bool exceed(Floats x, float most) { return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(most), _CMP_GT_OQ); }  // returns whether any lane does
INLINE float from_half(uint16_t x) { return _cvtsh_ss(x); }
INLINE Floats from_halves(const void *p) { return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE Floats from_bf16(const void *p) {
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
}
INLINE Floats from_bytes(const void *p) { return floats((Integers)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))); }
INLINE Floats halves(Dwords x) { return (Floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)x)); }  // the lower half of each dword, as float
INLINE Dwords look_up(Table table, Dwords x) {
    return (Dwords)_mm512_shuffle_epi8(_mm512_broadcast_i32x4((__m128i)table), (__m512i)x);
}
// Moves bits 4 * i to 4 * i + 3 to bit 4 of the four bytes, by a table: a third of the time of a multiplication of dwords
INLINE Dwords fifth_bits_of(Dwords high, int i) {
    const Dwords table{0, 0x10, 0x1000, 0x1010, 0x100000, 0x100010, 0x101000, 0x101010,
                       0x10000000, 0x10000010, 0x10001000, 0x10001010, 0x10100000, 0x10100010, 0x10101000, 0x10101010};
    return (Dwords)_mm512_permutexvar_epi32((__m512i)(high >> 4 * i), (__m512i)table);
}
// Stores the integers as bytes; returns their sum
INLINE int to_bytes(Integers x, int8_t *to) {
    _mm_storeu_si128((__m128i *)to, _mm512_cvtsepi32_epi8((__m512i)x));
    return _mm512_reduce_add_epi32((__m512i)x);
}

INLINE Dwords of_rows(const uint8_t *p, size_t stride) {  // 16 bytes each of rows 0, 4, 8 and 12
    __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)p));
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(p + 4 * stride)), 1);
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(p + 8 * stride)), 2);
    return (Dwords)_mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(p + 12 * stride)), 3);
}
// Like of_rows, for twice 16 consecutive bytes: with half as many loads, which take most of the time
INLINE void of_rows(const uint8_t *p, size_t stride, Dwords &first, Dwords &second) {
    const auto two = [&](size_t row) __attribute__((always_inline)) {
        const __m512i v = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(p + row * stride)));
        return _mm512_inserti64x4(v, _mm256_loadu_si256((const __m256i *)(p + (row + 4) * stride)), 1);
    };
    const __m512i a = two(0), b = two(8);
    first = (Dwords)_mm512_shuffle_i32x4(a, b, 0x88), second = (Dwords)_mm512_shuffle_i32x4(a, b, 0xdd);
}
// Interleave x and y within each 16 bytes, by dwords or pairs of dwords: the lower halves, and the upper ones
INLINE Dwords low32(Dwords x, Dwords y) { return (Dwords)_mm512_unpacklo_epi32((__m512i)x, (__m512i)y); }
INLINE Dwords high32(Dwords x, Dwords y) { return (Dwords)_mm512_unpackhi_epi32((__m512i)x, (__m512i)y); }
INLINE Dwords low64(Dwords x, Dwords y) { return (Dwords)_mm512_unpacklo_epi64((__m512i)x, (__m512i)y); }
INLINE Dwords high64(Dwords x, Dwords y) { return (Dwords)_mm512_unpackhi_epi64((__m512i)x, (__m512i)y); }

// Puts kN vectors of weights into the order for which add_dots() is fastest with several columns; here they stay as they are.
template <int kN> INLINE void arrange(Dwords *) {}
// Adds to dots[r][c] the dots of the kN vectors w[r] and the bytes of column c at `x`. kMost is the largest byte of weights, -1 if
// they are signed.
template <int kN, int kMost, Order kOrder, int kR, int kC, class X>
INLINE void add_dots(const Dwords *const (&w)[kR], const X &x, Integers (&dots)[kR][kC]) {
    UNROLL for (int j = 0; j < kN; j++) {
        UNROLL for (int c = 0; c < kC; c++) {
            if constexpr (kR == 1 && kOrder != Order::kSpans) {  // asm: gcc 12 would add broadcast instructions, a fifth of all
                asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(dots[0][c]) : "v"(w[0][j]), "m"(*x.at(c, j)));
                continue;
            }
            const Dwords v = x.dword(c, j);
            UNROLL for (int r = 0; r < kR; r++)
                dots[r][c] = (Integers)_mm512_dpbusd_epi32((__m512i)dots[r][c], (__m512i)w[r][j], (__m512i)v);
        }
    }
}

// Instructions written as asm: not all processors of this level have them, so the compiler may not use them itself.
INLINE Floats dot_pairs(Floats sum, Dwords w, Dwords x) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
    return sum;
}
INLINE void round_to_bf16(const float *x, int8_t *to) {
    __m256i rounded;
    asm("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(load<Floats>(x)));
    store(to, rounded);
}

}  // namespace
