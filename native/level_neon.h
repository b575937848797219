// NEON with the dot products of ARMv8.2 (dotprod); with the products of 2 x 8 and 8 x 2 bytes of ARMv8.6 (i8mm) if available.
#include <arm_neon.h>

#include <algorithm>

namespace {

constexpr int kFew = 8, kColumns = 8, kTile = 4;
constexpr bool kSignedBytes = true, kSaturates = false, kGathers = false, kDotsOfRows = false;
constexpr int kRegisters = 32, kSpansAhead = 0;  // not measured on a real processor

INLINE Floats fma(Floats a, Floats b, Floats c) { return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }
INLINE Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
INLINE Integers nearest(Floats x) { return (Integers)vcvtnq_s32_f32((float32x4_t)x); }
INLINE bool exceed(Floats x, float most) { return vmaxvq_u32((uint32x4_t)(x > most)); }
INLINE float from_half(uint16_t x) { return load<__fp16>(&x); }
INLINE Floats from_halves(const void *p) { return (Floats)vcvt_f32_f16(load<float16x4_t>(p)); }
INLINE Floats from_bf16(const void *p) { return (Floats)vshll_n_u16(load<uint16x4_t>(p), 16); }
INLINE Floats from_bytes(const void *p) {
    return floats((Integers)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(load<int32_t>(p)))))));
}
INLINE Floats halves(Dwords x) { return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32((uint32x4_t)x))); }
INLINE Dwords look_up(Table table, Dwords x) { return (Dwords)vqtbl1q_s8((int8x16_t)table, (uint8x16_t)x); }
INLINE Dwords fifth_bits_of(Dwords high, int i) { return (high >> 4 * i & 15) * 0x02040810 & 0x10101010; }
INLINE int to_bytes(Integers x, int8_t *to) {
    const int16x4_t words = vmovn_s32((int32x4_t)x);
    store(to, vget_lane_s32(vreinterpret_s32_s8(vmovn_s16(vcombine_s16(words, words))), 0));
    return vaddvq_s32((int32x4_t)x);
}

INLINE Dwords of_rows(const uint8_t *p, size_t) { return load<Dwords>(p); }  // 16 bytes of row 0
INLINE Dwords low32(Dwords x, Dwords y) { return (Dwords)vzip1q_u32((uint32x4_t)x, (uint32x4_t)y); }
INLINE Dwords high32(Dwords x, Dwords y) { return (Dwords)vzip2q_u32((uint32x4_t)x, (uint32x4_t)y); }
INLINE Dwords low64(Dwords x, Dwords y) { return (Dwords)vzip1q_u64((uint64x2_t)x, (uint64x2_t)y); }
INLINE Dwords high64(Dwords x, Dwords y) { return (Dwords)vzip2q_u64((uint64x2_t)x, (uint64x2_t)y); }

#if defined(__ARM_FEATURE_MATMUL_INT8)
// converts two vectors of dwords of rows 0 to 3: to eight bytes each of rows 0 and 1, and of rows 2 and 3
template <int kN> INLINE void arrange(Dwords *w) {
    UNROLL for (int j = 0; j < kN; j += 2) {
        const Dwords low = low32(w[j], w[j + 1]);
        w[j + 1] = high32(w[j], w[j + 1]), w[j] = low;
    }
}
// multiplies two rows with two columns at a time; an odd last column is paired with itself
template <int kN, int kR, int kC> INLINE void add_products(const Dwords *const (&w)[kR], const int8_t *x, Integers (&dots)[kR][kC]) {
    constexpr int kPairs = (kC + 1) / 2;
    int32x4_t sums[kR][kPairs][2]{};
    UNROLL for (int j = 0; j < kN; j += 4) {
        UNROLL for (int p = 0; p < kPairs; p++) {
            const Dwords a = load<Dwords>(x + 2 * p * 32 + j * 4), b = load<Dwords>(x + std::min(2 * p + 1, kC - 1) * 32 + j * 4);
            const int8x16_t low = (int8x16_t)low64(a, b), high = (int8x16_t)high64(a, b);
            UNROLL for (int r = 0; r < kR; r++) {
                UNROLL for (int i = 0; i < 2; i++) {
                    sums[r][p][i] = vmmlaq_s32(sums[r][p][i], (int8x16_t)w[r][j + i], low);
                    sums[r][p][i] = vmmlaq_s32(sums[r][p][i], (int8x16_t)w[r][j + 2 + i], high);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < kR; r++) {
        UNROLL for (int c = 0; c < kC; c++) {
            const auto &[upper, lower] = sums[r][c / 2];
            dots[r][c] += (Integers)(c % 2 ? vuzp2q_s32(upper, lower) : vuzp1q_s32(upper, lower));
        }
    }
}
#else
template <int kN> INLINE void arrange(Dwords *) {}
#endif

template <int kN, int kMost, Order kOrder, int kR, int kC, class X>
INLINE void add_dots(const Dwords *const (&w)[kR], const X &x, Integers (&dots)[kR][kC]) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if constexpr (kOrder == Order::kArranged) return add_products<kN>(w, x.x, dots);
#endif
    UNROLL for (int j = 0; j < kN; j += 4) {
        UNROLL for (int c = 0; c < kC; c++) {
            const int8x16_t v = load<int8x16_t>(x.x + c * 32 + j * 4);
            UNROLL for (int r = 0; r < kR; r++) {
                int32x4_t sum = (int32x4_t)dots[r][c];
                sum = vdotq_laneq_s32(sum, (int8x16_t)w[r][j], v, 0);
                sum = vdotq_laneq_s32(sum, (int8x16_t)w[r][j + 1], v, 1);
                sum = vdotq_laneq_s32(sum, (int8x16_t)w[r][j + 2], v, 2);
                sum = vdotq_laneq_s32(sum, (int8x16_t)w[r][j + 3], v, 3);
                dots[r][c] = (Integers)sum;
            }
        }
    }
}

}  // namespace
