// AVX2, FMA and F16C; with AVX-VNNI if the compiler may use it.
#include <immintrin.h>

#include <algorithm>

namespace {

constexpr int kTile = 4, kRegisters = 16;
constexpr int kSpansAhead = 0;  // 0: spans are never lanes (level_v4.h), because that is not faster here
#if defined(__AVXVNNI__)
constexpr bool kSignedBytes = false, kSaturates = false, kGathers = false, kDotsOfRows = false;
constexpr int kFew = 8, kColumns = 4;
#else
constexpr bool kSignedBytes = true, kSaturates = true, kGathers = true, kDotsOfRows = true;
constexpr int kFew = 4, kColumns = 4;
#endif

INLINE Floats fma(Floats a, Floats b, Floats c) { return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE Floats larger(Floats a, Floats b) { return (Floats)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE Floats smaller(Floats a, Floats b) { return (Floats)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE Integers nearest(Floats x) { return (Integers)_mm256_cvtps_epi32((__m256)x); }
INLINE bool exceed(Floats x, float most) {
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, _mm256_set1_ps(most), _CMP_GT_OQ));
}
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
INLINE Dwords fifth_bits_of(Dwords high, int i) {  // without a multiplication of dwords, which is four times slower on some processors
    const int at = i / 2 * 0x01010101;
    const __m128i byte = _mm_set_epi32(at + 0x0c0c0c0c, at + 0x08080808, at + 0x04040404, at);
    const __m256i bits = i % 2 ? (__m256i)high : (__m256i)((high & 0x0f0f0f0f) << 4);
    const __m256i some = _mm256_shuffle_epi8(bits, _mm256_broadcastsi128_si256(byte));
    return (Dwords)_mm256_min_epu8(_mm256_and_si256(some, _mm256_set1_epi32(0x80402010)), _mm256_set1_epi8(16));
}
INLINE int to_bytes(Integers x, int8_t *to) {
    const __m128i low = _mm256_castsi256_si128((__m256i)x), high = _mm256_extracti128_si256((__m256i)x, 1);
    const __m128i words = _mm_packs_epi32(low, high), pairs = _mm_madd_epi16(words, _mm_set1_epi16(1));
    _mm_storel_epi64((__m128i *)to, _mm_packs_epi16(words, words));
    const __m128i sums = _mm_add_epi32(pairs, _mm_unpackhi_epi64(pairs, pairs));
    return _mm_extract_epi32(sums, 0) + _mm_extract_epi32(sums, 1);
}

INLINE Dwords of_rows(const uint8_t *p, size_t stride) {  // 16 bytes each of rows 0 and 4
    return (Dwords)_mm256_set_m128i(_mm_loadu_si128((const __m128i *)(p + 4 * stride)), _mm_loadu_si128((const __m128i *)p));
}
INLINE Dwords floats_of_four_halves(const uint8_t *p, size_t stride) {  // of rows 0 and 4
    const __m128 low = _mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)p));
    return (Dwords)_mm256_cvtph_ps(_mm_castps_si128(_mm_loadh_pi(low, (const __m64 *)(p + 4 * stride))));
}
INLINE Dwords low32(Dwords x, Dwords y) { return (Dwords)_mm256_unpacklo_epi32((__m256i)x, (__m256i)y); }
INLINE Dwords high32(Dwords x, Dwords y) { return (Dwords)_mm256_unpackhi_epi32((__m256i)x, (__m256i)y); }
INLINE Dwords low64(Dwords x, Dwords y) { return (Dwords)_mm256_unpacklo_epi64((__m256i)x, (__m256i)y); }
INLINE Dwords high64(Dwords x, Dwords y) { return (Dwords)_mm256_unpackhi_epi64((__m256i)x, (__m256i)y); }

template <int kN> INLINE void arrange(Dwords *) {}
#if !defined(__AVXVNNI__)
// Returns 16-bit sums of two products each. Signed weights are multiplied as |w| * (x with the sign of w).
template <bool kIsSigned> INLINE __m256i products(Dwords weights, __m256i x) {
    const __m256i w = (__m256i)weights;
    return kIsSigned ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)) : _mm256_maddubs_epi16(w, x);
}
INLINE __m256i widened(__m256i sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }  // adds pairs of sums; results have 32 bits
// computes the dots of one column with kN vectors of the rows 0 and 4, 1 and 5, 2 and 6, 3 and 7; 16-bit sums as long as they fit
template <int kN, int kMost> INLINE Integers dots_of_rows(const Dwords *w, const int8_t *x) {
    constexpr bool kIsSigned = kMost < 0;
    __m256i sums[4];
    UNROLL for (int i = 0; i < 4; i++) sums[i] = _mm256_setzero_si256();
    UNROLL for (int i = 0; i < kN; i++) {
        const __m256i some = products<kIsSigned>(w[i], _mm256_broadcastsi128_si256(load<__m128i>(x + i / 4 * 16)));
        sums[i % 4] = kIsSigned ? _mm256_add_epi32(sums[i % 4], widened(some)) : _mm256_add_epi16(sums[i % 4], some);
    }
    const auto added = [](__m256i a, __m256i b, bool is_narrow) __attribute__((always_inline)) {
        return is_narrow ? _mm256_add_epi16(a, b) : _mm256_add_epi32(a, b);
    };
    __m256i pairs[2];
    UNROLL for (int i = 0; i < 2; i++) {
        const __m256i a = sums[2 * i], b = sums[2 * i + 1];
        pairs[i] = added(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b), !kIsSigned);
    }
    constexpr bool kFits = kMost * kN * 254 <= 32767;
    if (!kIsSigned && !kFits) pairs[0] = widened(pairs[0]), pairs[1] = widened(pairs[1]);
    const __m256i all = added(_mm256_unpacklo_epi64(pairs[0], pairs[1]), _mm256_unpackhi_epi64(pairs[0], pairs[1]), !kIsSigned && kFits);
    return (Integers)(!kIsSigned && kFits ? widened(all) : all);
}
#endif
template <int kN, int kMost, Order kOrder, int kR, int kC, class X>
INLINE void add_dots(const Dwords *const (&w)[kR], const X &x, Integers (&dots)[kR][kC]) {
#if defined(__AVXVNNI__)
    UNROLL for (int j = 0; j < kN; j++) {
        UNROLL for (int c = 0; c < kC; c++) {
            const Dwords v = x.dword(c, j);
            UNROLL for (int r = 0; r < kR; r++)
                dots[r][c] = (Integers)_mm256_dpbusd_avx_epi32((__m256i)dots[r][c], (__m256i)w[r][j], (__m256i)v);
        }
    }
#else
    if constexpr (kOrder == Order::kRows) {
        dots[0][0] += dots_of_rows<kN, kMost>(w[0], x.x);
        return;
    }
    // Sums of pairs have 16 bits as long as these suffice: each pair adds at most kMost * 127 * 2. The order of the asm() statements
    // keeps a vector of weights in a register for all columns. Otherwise gcc 12 loads it for each column, and these loads take 1.5
    // times as long as all other instructions.
    constexpr bool kIsSigned = kMost < 0;
    constexpr int kAdds = kIsSigned ? 1 : std::min(kN, 32767 / (kMost * 254));
    __m256i pairs[kR][kC];
    UNROLL for (int j = 0; j < kN; j++) {
        const bool is_first = j % kAdds == 0, is_last = j % kAdds == kAdds - 1 || j == kN - 1;
        UNROLL for (int c = 0; c < kC; c++) {
            __m256i x4 = (__m256i)x.dword(c, j);
            asm("" : "+x"(x4));
            UNROLL for (int r = 0; r < kR; r++) {
                const __m256i some = products<kIsSigned>(w[r][j], x4);
                pairs[r][c] = is_first ? some : _mm256_add_epi16(pairs[r][c], some);
                if (is_last) dots[r][c] += (Integers)widened(pairs[r][c]);
                if (kIsSigned) asm("" : "+x"(dots[r][c]));
                else asm("" : "+x"(pairs[r][c]));
            }
        }
    }
#endif
}

}  // namespace
