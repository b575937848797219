// AVX2, FMA and F16C; with AVX-VNNI where the compiler may use it.
#include <immintrin.h>

#include <algorithm>

namespace {

constexpr int kFew = 8, kColumns = 4, kTile = 4;
constexpr int kRegisters = 16;
#if defined(__AVXVNNI__)
constexpr bool kSignedBytes = false, kSaturates = false;
#else
constexpr bool kSignedBytes = true, kSaturates = true;
#endif

INLINE Floats fma(Floats a, Floats b, Floats c) { return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE Floats larger(Floats a, Floats b) { return (Floats)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE Integers nearest(Floats x) { return (Integers)_mm256_cvtps_epi32((__m256)x); }
INLINE float from_half(uint16_t x) { return _cvtsh_ss(x); }
INLINE Floats from_halves(const void *p) { return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE Floats from_bf16(const void *p) {
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
}
INLINE Floats from_bytes(const void *p) { return floats((Integers)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
INLINE Floats halves(Dwords x) {
    const __m256i low = _mm256_and_si256((__m256i)x, _mm256_set1_epi32(0xffff));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
    return (Floats)_mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}
INLINE Dwords look_up(Table table, Dwords x) {
    return (Dwords)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256((__m128i)table), (__m256i)x);
}
INLINE int to_bytes(Integers x, int8_t *to) {
    int sum = 0;
    for (int i = 0; i < kLanes; i++) to[i] = (int8_t)x[i], sum += x[i];
    return sum;
}

INLINE Dwords of_rows(const uint8_t *p, size_t stride) {  // 16 bytes of row 0 and 4
    return (Dwords)_mm256_set_m128i(_mm_loadu_si128((const __m128i *)(p + 4 * stride)), _mm_loadu_si128((const __m128i *)p));
}
INLINE Dwords low32(Dwords x, Dwords y) { return (Dwords)_mm256_unpacklo_epi32((__m256i)x, (__m256i)y); }
INLINE Dwords high32(Dwords x, Dwords y) { return (Dwords)_mm256_unpackhi_epi32((__m256i)x, (__m256i)y); }
INLINE Dwords low64(Dwords x, Dwords y) { return (Dwords)_mm256_unpacklo_epi64((__m256i)x, (__m256i)y); }
INLINE Dwords high64(Dwords x, Dwords y) { return (Dwords)_mm256_unpackhi_epi64((__m256i)x, (__m256i)y); }

template <int kN> INLINE void arrange(Dwords *) {}
template <int kN, int kMost, bool kArranged, int kR, int kC>
INLINE void add_dots(const Dwords *const (&w)[kR], const int8_t *x, Integers (&dots)[kR][kC]) {
#if defined(__AVXVNNI__)
    UNROLL for (int j = 0; j < kN; j++) {
        UNROLL for (int c = 0; c < kC; c++) {
            const Dwords v = broadcast(x + c * 32 + j * 4);
            UNROLL for (int r = 0; r < kR; r++)
                dots[r][c] = (Integers)_mm256_dpbusd_avx_epi32((__m256i)dots[r][c], (__m256i)w[r][j], (__m256i)v);
        }
    }
#else
    const __m256i ones = _mm256_set1_epi16(1);
    // sums of pairs stay 16 bits for as long as they fit: kMost * 127 * 2 each
    constexpr bool kIsSigned = kMost < 0;
    constexpr int kAdds = kIsSigned ? 1 : std::min(kN, 32767 / (kMost * 254));
    UNROLL for (int j = 0; j < kN; j += kAdds) {
        UNROLL for (int c = 0; c < kC; c++) {
            UNROLL for (int r = 0; r < kR; r++) {
                __m256i pairs = _mm256_setzero_si256();
                for (int i = j; i < std::min(j + kAdds, kN); i++) {
                    const __m256i weights = (__m256i)w[r][i], v = (__m256i)broadcast(x + c * 32 + i * 4);
                    // signed weights: |w| * (x with the sign of w)
                    const __m256i some = kIsSigned ? _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(v, weights))
                                                   : _mm256_maddubs_epi16(weights, v);
                    pairs = i == j ? some : _mm256_add_epi16(pairs, some);
                }
                dots[r][c] += (Integers)_mm256_madd_epi16(pairs, ones);
            }
        }
    }
#endif
}

}  // namespace
