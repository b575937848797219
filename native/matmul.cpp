// Products of weights and activations for ggml's CPU backend (MUL_MAT, MUL_MAT_ID). Weights are read from the mapped GGUF file,
// without repacking.
//
// Weight rows are the lanes of vectors: a few dwords of 16 rows (8 with AVX2) are transposed as they are read, so that no sum is
// horizontal. Activations are quantized to 8 bits by blocks of 32, with float scales. Products within a block are integers, and so
// exact; the blocks' floats are summed within each span of kSpan weights, then the spans' sums in order. The bits of a row of the
// batch depend only on its activations and the weights, not on the number of rows, on threads, or on the kernel.
//
// There are three kernels. For one column (row of the batch) of most types, or two of Q8_0, the lanes are kLanes consecutive spans
// of kSpan weights instead, so that memory is read in order. Up to kFew columns, weights are unpacked in registers for all of them.
// More columns share a slab of 2 * kLanes rows that is unpacked to the L1 cache.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <numeric>

#include "vectors.h"

namespace {

constexpr int kRows = 2 * kLanes;  // rows of a slab
constexpr int kSpan = 256;         // weights whose products are summed before they are added to a row's sum
constexpr bool kTakesSpans = kSpansAhead > 0;
constexpr int kClaim = 4;          // most units of work that a thread takes at a time

// Transposes of_rows() of the rows 0, 1, 2 and 3, so that each vector has one dword of each row
INLINE void transpose(const Dwords (&z)[4], Dwords *out) {
    const Dwords a = low32(z[0], z[1]), b = high32(z[0], z[1]), c = low32(z[2], z[3]), d = high32(z[2], z[3]);
    out[0] = low64(a, c), out[1] = high64(a, c), out[2] = low64(b, d), out[3] = high64(b, d);
}
// Reads the dwords kBegin to n - 1 of each row, 4 or 8 at a time; the last reads overlap, to read nothing beyond n
template <int n, int kBegin = 0> INLINE void dwords(const uint8_t *p, size_t stride, Dwords *out) {
    constexpr int kEights = kLanes == 16 && n >= 8 ? kBegin + (n - kBegin + 3) / 8 * 8 : kBegin;  // AVX2 does not gain
#if defined(__AVX512VNNI__)
#pragma GCC unroll 16
    for (int i = kBegin; i < kEights; i += 8) {
        Dwords z[2][4];
        const int at = i + 8 <= n ? i : n - 8;
        UNROLL for (int j = 0; j < 4; j++) of_rows(p + 4 * at + j * stride, stride, z[0][j], z[1][j]);
        transpose(z[0], out + at), transpose(z[1], out + at + 4);
    }
#endif
#pragma GCC unroll 16
    for (int i = kEights; i < n; i += 4) {
        const int at = i + 4 <= n ? i : n - 4;
        Dwords z[4];
        UNROLL for (int j = 0; j < 4; j++) z[j] = of_rows(p + 4 * at + j * stride, stride);
        transpose(z, out + at);
    }
}
template <Order kOrder, int n> INLINE void weights(const uint8_t *p, size_t stride, Dwords *out) {
    if constexpr (kOrder == Order::kRows) {
        UNROLL for (int i = 0; i < n; i++) out[i] = of_rows(p + i / 4 * 16 + i % 4 * stride, stride);
    } else {
        dwords<n>(p, stride, out);
    }
}
INLINE Floats halves_of_rows(const uint8_t *p, size_t stride) {
    uint16_t x __attribute__((vector_size(2 * kLanes)));
    UNROLL for (int i = 0; i < kLanes; i++) x[i] = load<uint16_t>(p + i * stride);
    return from_halves(&x);
}
INLINE Dwords bytes_of_rows(const uint8_t *p, size_t stride) {
    Dwords x;
    UNROLL for (int i = 0; i < kLanes; i++) x[i] = p[i * stride];
    return x;
}
// Calls f for the n dwords of each row, kEach dwords at a time. They are read into `all` by eights, and only when f needs them, so
// that few registers are in use.
template <int n, int kEach, int kAt = 0, class F> INLINE void each_of(const uint8_t *p, size_t stride, Dwords *all, F f) {
    constexpr int kEnd = kAt + kEach;
    dwords<std::min((kEnd + 7) / 8 * 8, n), std::min((kAt + 7) / 8 * 8, n)>(p, stride, all);
    f(all + kAt);
    if constexpr (kEnd < n) each_of<n, kEach, kEnd>(p, stride, all, f);
}
// Calls f(d, x) for kPairs pairs of blocks from p on, each a half and n dwords
template <Order kOrder, int n, int kPairs, class F> INLINE void pairs(const uint8_t *p, size_t stride, F f) {
    if constexpr (kGathers || kOrder == Order::kRows) {
        UNROLL for (int i = 0; i < 2 * kPairs; i++, p += 2 + 4 * n) {
            Dwords x[n];
            weights<kOrder, n>(p + 2, stride, x), f(halves_of_rows(p, stride), x);
        }
        return;
    }
    Dwords all[kPairs * (2 * n + 1)], x[n];
    each_of<kPairs * (2 * n + 1), 2 * n + 1>(p, stride, all, [&](const Dwords *pair) __attribute__((always_inline)) {
        UNROLL for (int i = 0; i < n; i++) x[i] = pair[i] >> 16 | pair[i + 1] << 16;
        f(halves(pair[0]), x), f(halves(pair[n] >> 16), pair + n + 1);
    });
}
// Whether a whole group is read at once, which takes fewer loads. Only AVX-512 has the registers for a group and a column's sums.
template <Order kOrder> constexpr bool kIsWhole = kLanes == 16 && kOrder == Order::kDwords;
INLINE Dwords byte(Dwords x, int i) { return x >> 8 * i & 255; }

// ---- formats (ggml-common.h): read() calls f with each block of kSub weights in order, as kSub / 4 vectors of bytes. A weight
// is d * (byte - kZero) + m; m is 0 unless kMin. kMost is the largest byte. A group of kGroup weights has kBytes bytes.

// Properties of a format for the kernels. A block takes kVectors vectors, 32 bytes of activations kActs vectors. kMost is used only
// where the dot instruction saturates. kMostBySpan is the largest number of columns for which few_by_span() is faster: 2 if 16 rows
// that are read and 16 that are prefetched exceed the L1 cache, 0 if arithmetic takes longest. kBursts: see few_by_span(). kMostFew
// is the largest number of columns for which weights are unpacked in registers: AVX2's 16-bit sums need more registers, so that
// only a few types can have four columns.
template <int sub, bool min, int most> struct Shape {
    static constexpr int kSub = sub, kVectors = sub / 4, kActs = 32, kMost = most, kChunk = 512;
    static constexpr bool kFloat = false, kPairs = false, kMin = min, kTakesRows = sub == 32;
    static constexpr int kMostBySpan = kTakesSpans ? 1 : 0, kBursts = 2, kMostFew = kFew - (kSaturates && (sub < 32 || most == 31));
    using Kernels = Shape<sub, min, kSaturates ? most : 0>;
};
struct FloatShape {  // formats whose weights are converted to floats
    static constexpr int kSub = 8, kVectors = 8, kActs = 8, kZero = 0, kMost = 0, kChunk = 128;
    static constexpr bool kFloat = true, kPairs = false, kMin = false, kTakesRows = false;
    static constexpr int kMostBySpan = 0, kMostFew = kFew;
    using Kernels = FloatShape;
};
struct Block {
    Dwords w[8];
    Floats d, m;
};
INLINE void nibbles(const Dwords *from, Block &b) {
    UNROLL for (int i = 0; i < 4; i++) b.w[i] = from[i] & 0x0f0f0f0f, b.w[4 + i] = from[i] >> 4 & 0x0f0f0f0f;
}
INLINE void fifth_bits(Dwords high, Block &b) {
    UNROLL for (int i = 0; i < 8; i++) b.w[i] |= fifth_bits_of(high, i);
}

struct Q4_0 : Shape<32, false, 15> {
    static constexpr int kGroup = 64, kBytes = 36, kZero = 8, kBursts = 1;
    template <Order kOrder, int kPairs, class F> static INLINE void read(const uint8_t *p, size_t stride, F f) {
        Block b;
        pairs<kOrder, 4, kPairs>(p, stride, [&](Floats d, const Dwords *x) __attribute__((always_inline)) { nibbles(x, b), b.d = d, f(b); });
    }
};
struct Q4_1 : Shape<32, true, 15> {
    static constexpr int kGroup = 64, kBytes = 40, kZero = 0, kBursts = 1;
    static constexpr bool kTakesRows = false;
    template <Order kOrder, int kPairs, class F> static INLINE void read(const uint8_t *p, size_t stride, F f) {
        Dwords all[10 * kPairs];
        Block b;
        each_of<10 * kPairs, 10>(p, stride, all, [&](const Dwords *x) __attribute__((always_inline)) {
            UNROLL for (int i = 0; i < 10; i += 5) nibbles(x + i + 1, b), b.d = halves(x[i]), b.m = halves(x[i] >> 16), f(b);
        });
    }
};
struct Q5_0 : Shape<32, false, 31> {
    static constexpr int kGroup = 64, kBytes = 44, kZero = 16;
    static constexpr bool kTakesRows = false;
    template <Order kOrder, int kPairs, class F> static INLINE void read(const uint8_t *p, size_t stride, F f) {
        Block b;
        pairs<kOrder, 5, kPairs>(p, stride, [&](Floats d, const Dwords *x) __attribute__((always_inline)) {
            nibbles(x + 1, b), fifth_bits(x[0], b), b.d = d, f(b);
        });
    }
};
struct Q5_1 : Shape<32, true, 31> {
    static constexpr int kGroup = 64, kBytes = 48, kZero = 0;
    static constexpr bool kTakesRows = false;
    template <Order kOrder, int kPairs, class F> static INLINE void read(const uint8_t *p, size_t stride, F f) {
        Dwords all[12 * kPairs];
        Block b;
        each_of<12 * kPairs, 12>(p, stride, all, [&](const Dwords *x) __attribute__((always_inline)) {
            UNROLL for (int i = 0; i < 12; i += 6)
                nibbles(x + i + 2, b), fifth_bits(x[i + 1], b), b.d = halves(x[i]), b.m = halves(x[i] >> 16), f(b);
        });
    }
};
constexpr int kMiddle = kSignedBytes ? 0 : 128, kMostByte = kSignedBytes ? -1 : 255;
constexpr uint32_t kFlip = kMiddle * 0x01010101u;
struct Q8_0 : Shape<32, false, kMostByte> {
    static constexpr int kGroup = 64, kBytes = 68, kZero = kMiddle, kMostBySpan = kTakesSpans ? 2 : 0, kBursts = 1;
    template <Order kOrder, int kPairs, class F> static INLINE void read(const uint8_t *p, size_t stride, F f) {
        Block b;
        pairs<kOrder, 8, kPairs>(p, stride, [&](Floats d, const Dwords *x) __attribute__((always_inline)) {
            UNROLL for (int j = 0; j < 8; j++) b.w[j] = x[j] ^ kFlip;
            b.d = d, f(b);
        });
    }
};
INLINE void look_up_nibbles(Block &b, Table table) {
    UNROLL for (int i = 0; i < 8; i++) b.w[i] = look_up(table, b.w[i]);
}
INLINE void iq4_values(Block &b) {
    const Table table{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    look_up_nibbles(b, table ^ (int8_t)kMiddle);
}
struct IQ4_NL : Shape<32, false, kMostByte> {
    static constexpr int kGroup = 64, kBytes = 36, kZero = kMiddle;
    template <Order kOrder, int kPairs, class F> static INLINE void read(const uint8_t *p, size_t stride, F f) {
        Q4_0::read<kOrder, kPairs>(p, stride, [&](Block &b) __attribute__((always_inline)) { iq4_values(b), f(b); });
    }
};
struct MXFP4 : Shape<32, false, 24> {
    static constexpr int kGroup = 64, kBytes = 34, kZero = 12;
    static INLINE Floats scale(Dwords e) {  // 2^(e - 128); also below the least normal number
        const Dwords denormal = 0x00200000 << e, normal = (e - 1) << 23;
        return (Floats)(e < 2 ? denormal : normal);
    }
    template <Order kOrder, int kPairs, class F> static INLINE void read(const uint8_t *p, size_t stride, F f) {
        const Table table{12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
        Block b;
        const auto give = [&](Dwords e, const Dwords *x) __attribute__((always_inline)) {
            nibbles(x, b), look_up_nibbles(b, table), b.d = scale(e), f(b);
        };
        if constexpr (kPairs == 4 && kIsWhole<kOrder>) {
            Dwords all[34], x[4];
            each_of<34, 17>(p, stride, all, [&](const Dwords *four) __attribute__((always_inline)) {
                UNROLL for (int i = 0; i < 4; i++, four += 4) {  // blocks of 17 bytes
                    UNROLL for (int j = 0; j < 4; j++) x[j] = i < 3 ? four[j] >> 8 * (i + 1) | four[j + 1] << (24 - 8 * i) : four[j + 1];
                    give(byte(four[0], i), x);
                }
            });
            return;
        }
        Dwords x[2][4], e[2];
        if constexpr (kGathers) {
            UNROLL for (int i = 0; i < 2; i++) e[i] = bytes_of_rows(p + 17 * i, stride), weights<kOrder, 4>(p + 17 * i + 1, stride, x[i]);
        } else {
            Dwords y[5];
            dwords<5>(p, stride, y), dwords<4>(p + 18, stride, x[1]);
            UNROLL for (int i = 0; i < 4; i++) x[0][i] = y[i] >> 8 | y[i + 1] << 24;
            e[0] = y[0] & 255, e[1] = byte(y[4], 1);
        }
        UNROLL for (int i = 0; i < 2; i++) give(e[i], x[i]);
        if constexpr (kPairs > 1) read<kOrder, kPairs - 1>(p + kBytes, stride, f);
    }
};
struct Q4_K : Shape<32, true, 15> {
    static constexpr int kGroup = 256, kBytes = 144, kZero = 0;
    // 6 bits each: scales and minima of the blocks 0 to 3 and 4 to 7
    static INLINE void scales(const Dwords *x, Dwords *s, Dwords *m) {
        s[0] = x[0] & 0x3f3f3f3f, m[0] = x[1] & 0x3f3f3f3f;
        s[1] = (x[2] & 0x0f0f0f0f) | (x[0] >> 2 & 0x30303030);
        m[1] = (x[2] >> 4 & 0x0f0f0f0f) | (x[1] >> 2 & 0x30303030);
    }
    template <Order kOrder, int, class F> static INLINE void read(const uint8_t *p, size_t stride, F f) { read_with<kOrder, false>(p, stride, f); }
    template <Order kOrder, bool kFifth, class F> static INLINE void read_with(const uint8_t *p, size_t stride, F f) {
        Dwords x[4], s[2], m[2], high[8];
        Block b;
        dwords<4>(p, stride, x);
        scales(x + 1, s, m);
        const Floats d = halves(x[0]), least = -halves(x[0] >> 16);
        if (kFifth) weights<kOrder, 8>(p + 16, stride, high);
        p += kFifth ? 48 : 16;
        UNROLL for (int i = 0; i < 8; i += 2, p += 32) {
            Dwords q[8];
            weights<kOrder, 8>(p, stride, q);
            UNROLL for (int j = i; j < i + 2; j++) {
                UNROLL for (int k = 0; k < 8; k++) {
                    b.w[k] = q[k] >> 4 * (j - i) & 0x0f0f0f0f;
                    if (kFifth) b.w[k] |= (j < 4 ? high[k] << (4 - j) : high[k] >> (j - 4)) & 0x10101010;
                }
                b.d = d * floats(byte(s[j / 4], j % 4)), b.m = least * floats(byte(m[j / 4], j % 4)), f(b);
            }
        }
    }
};
struct Q5_K : Shape<32, true, 31> {
    static constexpr int kGroup = 256, kBytes = 176, kZero = 0;
    template <Order kOrder, int, class F> static INLINE void read(const uint8_t *p, size_t stride, F f) { Q4_K::read_with<kOrder, true>(p, stride, f); }
};
struct Q6_K : Shape<16, false, 63> {
    static constexpr int kGroup = 256, kBytes = 210, kZero = 32;
    template <Order kOrder, int, class F> static INLINE void read(const uint8_t *p, size_t stride, F f) {
        Dwords last[8], s[4];
        Block b;
        dwords<8>(p + 178, stride, last);
        UNROLL for (int i = 0; i < 4; i++) s[i] = last[3 + i] >> 16 | last[4 + i] << 16;
        const Floats d = halves(last[7] >> 16);
        UNROLL for (int n = 0; n < 2; n++) {
            Dwords low[16], high[8];
            weights<kOrder, 16>(p + 64 * n, stride, low), weights<kOrder, 8>(p + 128 + 32 * n, stride, high);
            UNROLL for (int i = 0; i < 8; i++) {  // blocks of 16
                UNROLL for (int k = 0; k < 4; k++) {
                    const int at = 4 * (i % 2) + k, quarter = i / 2;
                    const Dwords top = quarter < 2 ? high[at] << (4 - 2 * quarter) : high[at] >> (2 * quarter - 4);
                    b.w[k] = (low[8 * (quarter % 2) + at] >> 4 * (quarter / 2) & 0x0f0f0f0f) | (top & 0x30303030);
                }
                const Integers scale = (Integers)(s[2 * n + i / 4] << (24 - 8 * (i % 4))) >> 24;
                b.d = d * floats(scale), f(b);
            }
        }
    }
};
struct Q3_K : Shape<16, false, 7> {
    static constexpr int kGroup = 256, kBytes = 110, kZero = 4, kMostBySpan = 0;
    template <Order kOrder, int, class F> static INLINE void read(const uint8_t *p, size_t stride, F f) {
        Dwords high[8], x[4], last[4];
        Block b;
        weights<kOrder, 8>(p, stride, high), dwords<4>(p + 92, stride, x), dwords<4>(p + 94, stride, last);
        const Floats d = halves(last[3] >> 16);
        const Dwords a0 = x[1], a1 = x[2], a2 = x[3];
        const Dwords s[4] = {(a0 & 0x0f0f0f0f) | (a2 & 0x03030303) << 4, (a1 & 0x0f0f0f0f) | (a2 >> 2 & 0x03030303) << 4,
                             (a0 >> 4 & 0x0f0f0f0f) | (a2 >> 4 & 0x03030303) << 4,
                             (a1 >> 4 & 0x0f0f0f0f) | (a2 >> 6 & 0x03030303) << 4};
        UNROLL for (int n = 0; n < 2; n++) {
            Dwords q[8];
            weights<kOrder, 8>(p + 32 + 32 * n, stride, q);
            UNROLL for (int i = 0; i < 8; i++) {
                UNROLL for (int k = 0; k < 4; k++) {
                    const int at = 4 * (i % 2) + k, bit = 4 * n + i / 2;
                    const Dwords top = bit < 2 ? high[at] << (2 - bit) : high[at] >> (bit - 2);
                    b.w[k] = (q[at] >> 2 * (i / 2) & 0x03030303) | (top & 0x04040404);
                }
                b.d = d * floats((Integers)byte(s[2 * n + i / 4], i % 4) - 32), f(b);
            }
        }
    }
};
struct Q2_K : Shape<16, true, 3> {
    static constexpr int kGroup = 256, kBytes = 84, kZero = 0, kMostBySpan = 0;
    template <Order kOrder, int, class F> static INLINE void read(const uint8_t *p, size_t stride, F f) {
        Dwords s[21], *q = s + 4;
        Block b;
        if (kIsWhole<kOrder>) dwords<21>(p, stride, s);
        else dwords<4>(p, stride, s), dwords<21, 17>(p, stride, s);
        const Floats d = halves(s[20]), least = -halves(s[20] >> 16);
        UNROLL for (int n = 0; n < 2; n++, q += 8) {
            if (!kIsWhole<kOrder>) weights<kOrder, 8>(p + 16 + 32 * n, stride, q);
            UNROLL for (int i = 0; i < 8; i++) {
                UNROLL for (int k = 0; k < 4; k++) b.w[k] = q[4 * (i % 2) + k] >> 2 * (i / 2) & 0x03030303;
                const Dwords scale = byte(s[2 * n + i / 4], i % 4);
                b.d = d * floats(scale & 15), b.m = least * floats(scale >> 4), f(b);
            }
        }
    }
};
struct IQ4_XS : Shape<32, false, kMostByte> {
    static constexpr int kGroup = 256, kBytes = 136, kZero = kMiddle;
    template <Order kOrder, int, class F> static INLINE void read(const uint8_t *p, size_t stride, F f) {
        constexpr int kOnce = kLanes == 16 ? 2 : 1;  // number of blocks read together
        Dwords x[4], q[4 * kOnce];
        Block b;
        dwords<4>(p, stride, x);
        const Floats d = halves(x[0]);
        const Dwords high = x[0] >> 16, low = x[1];
        UNROLL for (int i = 0; i < 8; i++) {
            if (i % kOnce == 0) weights<kOrder, 4 * kOnce>(p + 8 + 16 * i, stride, q);
            nibbles(q + 4 * (i % kOnce), b), iq4_values(b);
            b.d = d * floats((Integers)((low >> 4 * i & 15) | (high >> 2 * i & 3) << 4) - 32), f(b);
        }
    }
};

struct F32 : FloatShape {
    static constexpr int kGroup = 8, kBytes = 32;
    template <Order kOrder, int, class F> static INLINE void read(const uint8_t *p, size_t stride, F f) {
        Block b;
        dwords<8>(p, stride, b.w), f(b);
    }
};
struct F16 : FloatShape {
    static constexpr int kGroup = 8, kBytes = 16;
    template <Order kOrder, int, class F> static INLINE void read(const uint8_t *p, size_t stride, F f) {
        Block b;
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
        UNROLL for (int i = 0; i < 8; i += 4) {
            Dwords z[4];
            UNROLL for (int j = 0; j < 4; j++) z[j] = floats_of_four_halves(p + 2 * i + j * stride, stride);
            transpose(z, b.w + i);
        }
        f(b);
        return;
#endif
        Dwords x[4];
        dwords<4>(p, stride, x);
        UNROLL for (int i = 0; i < 4; i++) b.w[2 * i] = (Dwords)halves(x[i]), b.w[2 * i + 1] = (Dwords)halves(x[i] >> 16);
        f(b);
    }
};
struct BF16 : FloatShape {
    static constexpr int kGroup = 8, kBytes = 16;
    template <Order kOrder, int, class F> static INLINE void read(const uint8_t *p, size_t stride, F f) {
        Dwords x[4];
        Block b;
        dwords<4>(p, stride, x);
        UNROLL for (int i = 0; i < 4; i++) b.w[2 * i] = x[i] << 16, b.w[2 * i + 1] = x[i] & 0xffff0000;
        f(b);
    }
};

#if defined(__AVX512VNNI__)
// BF16 if the processor multiplies pairs of BF16 (AVX512_BF16): activations are rounded to BF16, as in llama.cpp
struct PairShape {
    static constexpr int kSub = 16, kVectors = 8, kActs = 16, kZero = 0, kMost = 0, kChunk = 256;
    static constexpr bool kFloat = true, kPairs = true, kMin = false, kTakesRows = false;
    static constexpr int kMostBySpan = 0, kMostFew = kFew;
    using Kernels = PairShape;
};
struct BF16Pairs : PairShape {
    static constexpr int kGroup = 16, kBytes = 32;
    template <Order kOrder, int, class F> static INLINE void read(const uint8_t *p, size_t stride, F f) { F32::read<kOrder, 1>(p, stride, f); }
};
#endif

// ---- activations

// Data of a block of activations besides the bytes: `scale`; and `start`, the integer sum's first value (-kZero * sum of bytes), or,
// for formats with minima, `sum`, which is scale * sum of bytes.
struct Extra {
    float scale;
    union { int32_t start; float sum; };
};

// Layout of activations by groups of columns: [group][block][column][32 bytes], and extras [group][block of kSub][column].
//
// With spans as lanes, dwords instead: [dword of a span][column][pitch], and scales, then starts or sums,
// [block of a span][column][pitch]: the spans of a row, then the first kLanes spans again, so that kLanes consecutive spans are
// side by side, whichever is first.
struct Layout {
    int n, blocks, width, pitch;
    bool is_by_span, is_few;
    Layout(int n, int blocks, int rows, int most_few, int most_by_span, int pitch)
        : n(n), blocks(blocks), width(kTile), pitch(pitch), is_by_span(n <= most_by_span),
          is_few(is_by_span || n <= most_few || rows < kRows) {
        const int passes = (n + kColumns - 1) / kColumns;
        if (is_few) width = (n + passes - 1) / std::max(passes, 1);
    }
    int groups() const { return (n + width - 1) / width; }
    int size(int g) const { return std::min(width, n - g * width); }
    size_t at(int column, int block) const {
        const int g = column / width;
        return (size_t)g * width * blocks + (size_t)block * size(g) + column % width;
    }
};

// Quantizes one block of 32. The largest value is found by its bits, as an integer: NaN is above infinity, and makes the scale NaN.
template <class T> INLINE void quantize_block(const float *x, int8_t *to, Extra *extras, int between) {
#if defined(__AVX512VNNI__)
    if constexpr (T::kPairs) return round_to_bf16(x, to);
#endif
    if constexpr (T::kFloat) {
        memcpy(to, x, 32);
        return;
    }
    constexpr int kParts = 32 / kLanes;
    Floats v[kParts];
    Integers most{};
    for (int i = 0; i < kParts; i++) {
        v[i] = load<Floats>(x + i * kLanes);
        const Integers bits = (Integers)v[i] & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    int32_t largest = 0;
    for (int i = 0; i < kLanes; i++) largest = std::max(largest, most[i]);
    float top;
    memcpy(&top, &largest, 4);
    const float by = top > 1e-36f ? 127.0f / top : 0.0f;  // below this, 127 / top is infinite
    int sums[2] = {0, 0};
    for (int i = 0; i < kParts; i++)  // NaN becomes -127 here, so that no integer needs a special meaning
        sums[i * kLanes / 16] += to_bytes(nearest(larger(v[i] * by, all(-127.0f))), to + i * kLanes);
    const float scale = top / 127.0f;
    constexpr int kSubs = 32 / T::kSub;
    if (kSubs == 1) sums[0] += sums[1];
    for (int i = 0; i < kSubs; i++) {
        Extra &e = extras[i * between];
        e.scale = scale;
        if (T::kMin) e.sum = scale * sums[i];
        else e.start = -T::kZero * sums[i];
    }
}

// ---- kernels

// Adds to sums[r][c] the product of one block of weights (kR vectors of rows) with activations (kC columns) at `x`
template <class T, Order kOrder, int kR, int kC, class X>
INLINE void multiply(const Dwords *const (&w)[kR], const Floats (&d)[kR], const Floats (&m)[kR], const X &x, Floats (&sums)[kR][kC]) {
    constexpr int kN = T::kVectors;
    if constexpr (T::kFloat) {
        Floats some[kR][kC]{};  // separate sums for this block: the rounding error is smaller than with one long sum
        UNROLL for (int j = 0; j < kN; j++) {
            UNROLL for (int c = 0; c < kC; c++) {
                const Dwords v = x.dword(c, j);
#if defined(__AVX512VNNI__)
                if constexpr (T::kPairs) {
                    UNROLL for (int r = 0; r < kR; r++) some[r][c] = dot_pairs(some[r][c], w[r][j], v);
                    continue;
                }
#endif
                UNROLL for (int r = 0; r < kR; r++) some[r][c] = fma((Floats)w[r][j], (Floats)v, some[r][c]);
            }
        }
        UNROLL for (int c = 0; c < kC; c++)
            UNROLL for (int r = 0; r < kR; r++) sums[r][c] += some[r][c];
    } else {
        Integers dots[kR][kC];
        UNROLL for (int c = 0; c < kC; c++)
            UNROLL for (int r = 0; r < kR; r++) dots[r][c] = T::kMin ? Integers{} : x.start(c);
        add_dots<kN, T::kMost, kOrder>(w, x, dots);
        UNROLL for (int c = 0; c < kC; c++) {
            UNROLL for (int r = 0; r < kR; r++) {
                sums[r][c] = fma(floats(dots[r][c]), d[r] * x.scale(c), sums[r][c]);
                if (T::kMin) sums[r][c] = fma(m[r], x.sum(c), sums[r][c]);
            }
        }
    }
}

// Position of a kernel in a column group's activations: all lanes read the same activations
template <class T, int kC> struct Position {
    const int8_t *x;
    const Extra *e;
    int half = 0;
    INLINE const uint32_t *at(int c, int j) const { return (const uint32_t *)(x + c * 32 + j * 4); }
    INLINE Dwords dword(int c, int j) const { return broadcast(x + c * 32 + j * 4); }
    INLINE Integers start(int c) const { return all(e[c].start); }
    INLINE Floats scale(int c) const { return all(e[c].scale); }
    INLINE Floats sum(int c) const { return all(e[c].sum); }
    INLINE void step() {
        e += kC;
        if (T::kSub == T::kActs) x += 32 * kC;
        else if (half ^= 1) x += 16;
        else x += 32 * kC - 16;
    }
};
// Like the struct above, if lanes are spans: each lane reads its own activations
template <class T, int kC> struct SpanPosition {
    const int32_t *x;
    const float *scales;
    const void *seconds;  // second field of each Extra: start of the integer sum, or scale * sum for formats with minima
    int pitch;
    INLINE Dwords dword(int c, int j) const { return load<Dwords>(x + (j * kC + c) * pitch); }
    INLINE Integers start(int c) const { return load<Integers>((const int32_t *)seconds + c * pitch); }
    INLINE Floats scale(int c) const { return load<Floats>(scales + c * pitch); }
    INLINE Floats sum(int c) const { return load<Floats>((const float *)seconds + c * pitch); }
    INLINE void step() { x += T::kVectors * kC * pitch, scales += kC * pitch, seconds = (const float *)seconds + kC * pitch; }
};

// Prefetches a part of the next rows: with many columns always to the L2 cache, because a slab fills L1.
INLINE const uint8_t *prefetch(const uint8_t *p, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
    return p + bytes;
}
template <class T> INLINE const uint8_t *prefetch_for_few(const uint8_t *p, int bytes) {
    // The compiler spreads unrolled prefetches over the code of a whole group, which costs Q6_K a third of its rate on AVX-512.
    constexpr bool kIsLoop = kLanes == 16 && T::kGroup == kSpan;
    if (!g_prefetches_to_l1) return prefetch(p, bytes);
    if constexpr (kIsLoop) {
        prefetch_lines<3>(p, bytes);
    } else {
        UNROLL for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
    }
    return p + bytes;
}

template <class T> constexpr int groups_of_span = T::kFloat || kLanes < 16 ? 1 : kSpan / T::kGroup;  // read together, by eights
template <class T> constexpr int share_of = T::kBytes * kLanes / (T::kGroup / T::kSub);  // bytes of a block of kLanes rows

// Calls f(block) for k weights of kLanes rows. For a slab, groups of more than three cache lines (Q6_K) are prefetched to L1 one
// group early, because reads from L2 wait for the prefetches from memory. Returns the address from which to prefetch next.
template <class T, Order kOrder, bool kIsFew, int kGroups = groups_of_span<T>, class F>
INLINE const uint8_t *each_block(const uint8_t *w, size_t stride, int k, const uint8_t *ahead, int share, F f) {
    if (kGroups > 1 && k % kSpan) return each_block<T, kOrder, kIsFew, 1>(w, stride, k, ahead, share, f);
    constexpr int kBlocks = T::kGroup / T::kSub;
    for (int i = 0; i < k; i += kGroups * T::kGroup, w += kGroups * T::kBytes) {
        int block = 0;
        T::template read<kOrder, kGroups>(w, stride, [&](Block &b) __attribute__((always_inline)) {
            ahead = kIsFew ? prefetch_for_few<T>(ahead, share) : prefetch(ahead, share);
            if constexpr (T::kBytes > 192 && !kIsFew) {
                for (int row = block * kLanes / kBlocks; row < (block + 1) * kLanes / kBlocks; row++)
                    for (int at = 0; at < T::kBytes + 63; at += 64)
                        __builtin_prefetch(w + row * stride + T::kBytes + std::min(at, T::kBytes - 1));
                block++;
            }
            f(b);
        });
    }
    return ahead;
}

// Multiplies kLanes rows with kC columns into out[column][lane]. `ahead`: weights to prefetch meanwhile.
template <class T, int kC>
INLINE void few_rows(const uint8_t *w, size_t stride, int k, const int8_t *x, const Extra *e, float *out, const uint8_t *ahead) {
    Position<T, kC> at{x, e};
    constexpr Order kOrder = kC > 1 ? Order::kArranged : kDotsOfRows && T::kTakesRows ? Order::kRows : Order::kDwords;
    const int span = T::kFloat ? k : kSpan;
    Floats totals[kC]{};
    for (int i = 0; i < k; i += span, w += span / T::kGroup * T::kBytes) {
        Floats sums[1][kC]{};
        ahead = each_block<T, kOrder, true>(w, stride, std::min(span, k - i), ahead, share_of<T>, [&](Block &b) __attribute__((always_inline)) {
            if constexpr (kC > 1 && !T::kFloat) arrange<T::kVectors>(b.w);
            multiply<typename T::Kernels, kOrder>({b.w}, {b.d}, {b.m}, at, sums);
            at.step();
        });
        for (int c = 0; c < kC; c++) totals[c] += sums[0][c];
    }
    for (int c = 0; c < kC; c++) store(out + c * kLanes, totals[c]);
}

// For groups of 256 and several columns, gcc 12 would keep in memory a pointer to each dword that it reads, and advance all of
// these pointers: on AVX-512, two rows of Q2_K and Q3_K came to a third of the rate. Other types and levels gain 5 to 10 % by them.
template <class T, int kC, class... Args> __attribute__((optimize("no-ivopts"))) void few_groups(Args... args) { few_rows<T, kC>(args...); }
template <class T, int kC, class... Args> __attribute__((noinline)) void few(Args... args) {
    if constexpr (kLanes == 16 && T::kGroup == kSpan) few_groups<T, kC>(args...);
    else few_rows<T, kC>(args...);
}

// Like few(), if lanes are spans: kLanes rows, one after the other, are `spans` groups of kLanes spans. Prefetches run kSpansAhead
// bytes before the reads, and continue from the end of these rows with the `next` rows: memory is read in order, and used from L1.
// On Zen 5, most types prefetch a group's cache lines (36 for Q4_K) in two bursts. One burst had 0.9 to 0.96 of the rate of two if two
// threads read memory at 75 GB/s, and 0.93 for Q6_K at 50 GB/s. Q4_0, Q4_1 and Q8_0 use one burst, because two lose as much at 50 GB/s
// as they gain at 75. Prefetches spread over all blocks had half of the rate there. On Zen 4, they have 1.04 to 1.27 times the rate of
// bursts (docs/decisions/110-one-row-in-order.md). `products`: space for kC * kLanes * spans floats.
template <class T, int kC>
void few_by_span(const uint8_t *w, int spans, const SpanPosition<T, kC> &x, float *out, float *products, const uint8_t *next) {
    constexpr int kParts = kSpan / T::kGroup, kBytes = kParts * T::kBytes, kOnce = kLanes * kBytes;
    constexpr int kBlocks = kSpan / T::kSub, kFirst = T::kBursts > 1 ? kOnce / 128 * 64 : kOnce;  // kFirst: bytes of the first burst
    const int n = kLanes * spans;
    const uint8_t *end = w + (size_t)n * kBytes;
    const ptrdiff_t early = std::min<ptrdiff_t>(kSpansAhead, end - w);
    for (int i = 0, span = 0; i < n; i += kLanes, w += kOnce) {
        const uint8_t *ahead = end - w > early ? w + early : next + (early - (end - w));
        auto prefetch_burst = [&](int from, int to) __attribute__((always_inline)) {
            if (g_prefetches_to_l1) prefetch_lines<0>(ahead + from, to - from);
        };
        auto prefetch_with_block = [&](int block) __attribute__((always_inline)) {  // from memory to L2; the next spans, which L2 has, to L1
            if (g_prefetches_to_l1) return;
            const int from = kOnce * block / kBlocks / 64 * 64, to = block + 1 < kBlocks ? kOnce * (block + 1) / kBlocks / 64 * 64 : kOnce;
            for (int line = from; line < to; line += 64) __builtin_prefetch(ahead + line, 0, 2);
            for (int line = from; line < to; line += 64) __builtin_prefetch(w + kOnce + line, 0, 3);
        };
        prefetch_burst(0, kFirst);
        int block = 0;
        Floats sums[1][kC]{};
        SpanPosition<T, kC> at{x.x + span, x.scales + span, (const float *)x.seconds + span, x.pitch};
        T::template read<Order::kDwords, kParts>(w, kBytes, [&](Block &b) __attribute__((always_inline)) {
            prefetch_with_block(block);
            multiply<typename T::Kernels, Order::kSpans>({b.w}, {b.d}, {b.m}, at, sums);
            at.step();
            if (++block == kBlocks / 2) prefetch_burst(kFirst, kOnce);
        });
        for (int c = 0; c < kC; c++) store(products + c * n + i, sums[0][c]);
        for (span += kLanes; span >= spans;) span -= spans;
    }
    for (int i = 0; i < kC * kLanes; i++, products += spans) out[i] = std::accumulate(products, products + spans, 0.0f);
}

// A slab: [block][vector of rows]{bytes, d, m}, kChunk weights of a row: some 20 KB, which stay in the L1 cache
// (100 KB in L2 cost a tenth of the rate at 32 columns)
template <class T> struct alignas(64) Unpacked {
    Dwords w[T::kVectors];
    Floats d, m[T::kMin ? 1 : 0];
};
template <class T> void unpack(const uint8_t *w, size_t stride, int k, Unpacked<typename T::Kernels> *to, const uint8_t *ahead, int share) {
    each_block<T, Order::kArranged, false>(w, stride, k, ahead, share, [&](Block &b) __attribute__((always_inline)) {
        if constexpr (!T::kFloat) arrange<T::kVectors>(b.w);
        UNROLL for (int j = 0; j < T::kVectors; j++) to->w[j] = b.w[j];
        to->d = b.d;
        if constexpr (T::kMin) to->m[0] = b.m;
        to += 2;
    });
}
// Adds a chunk's products to sums[column][2 * kLanes]; the first chunk sets the sums
template <class T, int kC>
void tile(const Unpacked<T> *w, int k, const int8_t *x, const Extra *e, float *out, bool is_first, const uint8_t *ahead, int share) {
    Position<T, kC> at{x, e};
    for (int begin = 0; begin < k; begin += kSpan, is_first = false) {  // kSpan weights at a time
        Floats sums[2][kC]{};
        const auto each_total = [&](auto f) __attribute__((always_inline)) {
            for (int c = 0; c < kC; c++)
                for (int r = 0; r < 2; r++) f(sums[r][c], out + c * kRows + r * kLanes);
        };
        if (T::kFloat && !is_first) each_total([](Floats &sum, const float *total) { sum = load<Floats>(total); });
        for (int i = begin; i < std::min(begin + kSpan, k); i += T::kSub, w += 2, at.step()) {
            ahead = prefetch(ahead, share);
            Floats m[2]{};
            if constexpr (T::kMin) m[0] = w[0].m[0], m[1] = w[1].m[0];
            // From three columns on, keep the sums in memory, because the dot products need the registers. With fewer columns, that
            // would be slower: each block would wait for the sums.
            if (kRegisters < 32 && kC > 2 && !T::kFloat) asm("" : "+m"(sums));
            multiply<T, Order::kArranged>({w[0].w, w[1].w}, {w[0].d, w[1].d}, {m[0], m[1]}, at, sums);
        }
        each_total([&](Floats sum, float *total) { store(total, T::kFloat ? sum : (is_first ? Floats{} : load<Floats>(total)) + sum); });
    }
}

// ---- operations

size_t round_up(size_t n) { return (n + 63) / 64 * 64; }

struct Place { int32_t slot, token; };  // token and expert slot of a MUL_MAT_ID column

// The work units of one thread, which takes them from the front, because memory is read fastest in order, and so that no two threads
// prefetch the same rows. A thread whose range is empty takes a unit from the end of another thread's range.
struct Range { int32_t first, end; };
typedef std::atomic<Range> Units;
Range take(Units &units, bool is_front, int most) {
    Range all = units.load(std::memory_order_relaxed), taken, left;
    do {
        if (all.first == all.end) return all;
        const int n = std::clamp((all.end - all.first) / 4, 1, most);
        taken = left = all;
        if (is_front) taken.end = left.first = all.first + n;
        else taken.first = left.end = all.end - n;
    } while (!units.compare_exchange_weak(all, left, std::memory_order_relaxed));
    return taken;
}

// last: the address that this thread read first in the last product. after: by such an address (hashed), the first address of the
// product that followed, to prefetch it next time.
struct { const uint8_t *last, *after[512]; } thread_local t_starts;
const uint8_t *&next_start() { return t_starts.after[(uintptr_t)t_starts.last / 64 * 0x9e3779b97f4a7c15u >> 55]; }

// A MUL_MAT, or one expert of a MUL_MAT_ID: its weights, and the columns with which they are multiplied
struct Product {
    const uint8_t *weights;
    const ggml_tensor *op;
    const Place *places;  // null for MUL_MAT
    Layout layout;
    int8_t *bytes;
    Extra *extras;

    int step() const { return layout.is_few ? kLanes : kRows; }  // rows of a unit
    int units() const { return layout.n ? (op->src[0]->ne[1] + step() - 1) / step() : 0; }
    template <class T, int kC> SpanPosition<T, kC> spans() const {
        const float *scales = (const float *)extras;
        return {(const int32_t *)bytes, scales, scales + kSpan / T::kSub * kC * layout.pitch, layout.pitch};
    }
    const float *source(int c) const {
        const ggml_tensor *x = op->src[1];
        const char *data = (const char *)x->data;
        if (!places) return (const float *)(data + c * x->nb[1]);
        return (const float *)(data + places[c].slot % x->ne[1] * x->nb[1] + places[c].token * x->nb[2]);
    }
    float *target(int c) const {
        char *data = (char *)op->data;
        if (!places) return (float *)(data + c * op->nb[1]);
        return (float *)(data + places[c].slot * op->nb[1] + places[c].token * op->nb[2]);
    }
};

template <class T> struct Operation {
    static constexpr int kSubs = T::kActs / T::kSub, kChunk = T::kChunk;
    const ggml_tensor *op, *w, *x, *ids;
    int k, rows, n, experts;
    int most_by_span = 0, pitch = 0;  // numbers of columns
    Operation(const ggml_tensor *op) : op(op), w(op->src[0]), x(op->src[1]), ids(op->op == GGML_OP_MUL_MAT_ID ? op->src[2] : nullptr) {
        k = w->ne[0], rows = w->ne[1], experts = ids ? w->ne[2] : 1;
        n = ids ? ids->ne[0] * ids->ne[1] : x->ne[1];
        if (!T::kMostBySpan || k % kSpan || w->nb[1] != (size_t)k / T::kGroup * T::kBytes) return;
        const int most = k <= 5120 ? T::kMostBySpan : 1;  // for longer rows, the activations would not stay in L1
        if (n > (ids ? 64 : most)) return;  // with many columns, few experts have so few columns, and the layout takes more memory
        most_by_span = most, pitch = k / kSpan + kLanes;
        if (pitch % 64 == 0) pitch += 16;  // a pitch of a multiple of 256 bytes would use only few sets of the L1 cache
    }
    size_t column_bytes() const { return pitch ? kSpan * pitch : k / T::kActs * 32; }
    size_t column_extras() const { return T::kFloat ? 0 : (pitch ? kSpan * pitch : k) / T::kSub; }
    static size_t slab_size() { return sizeof(Unpacked<typename T::Kernels>) * 2 * (kChunk / T::kSub); }
    size_t places_size() const { return ids ? round_up(n * sizeof(Place)) + round_up((experts + 1) * 4) : 0; }
    size_t bytes_size() const { return round_up(n * column_bytes()); }
    size_t shared_size() const { return places_size() + bytes_size() + round_up(n * column_extras() * sizeof(Extra)); }
    size_t thread_size() const {
        const size_t products = pitch ? round_up(2 * sizeof(float) * kLanes * (k / kSpan)) : 0;
        return 64 + std::max(products, slab_size() + round_up((size_t)n * kRows * sizeof(float)));
    }
    size_t work_size(int n_threads) const { return 64 + shared_size() + n_threads * thread_size(); }

    void compute(ggml_compute_params *params, const Additions &added) const {
        uint8_t *work = (uint8_t *)round_up((uintptr_t)params->wdata);
        Place *places = (Place *)work;
        int32_t *firsts = (int32_t *)(work + round_up(n * sizeof(Place)));
        int8_t *bytes = (int8_t *)work + places_size();
        Extra *extras = (Extra *)(bytes + bytes_size());
        auto units_of = [&](int thread) -> Units & { return *(Units *)(work + shared_size() + thread * thread_size()); };
        uint8_t *own = (uint8_t *)&units_of(params->ith) + 64;
        if (params->ith == 0) {
            if (ids) sort_by_expert(places, firsts);
            if (g_stream) stream_begin(op, firsts, params->nth);
        }
        if (ids) g_barrier(params->threadpool);
        const uint8_t *weights = (const uint8_t *)w->data;
        auto product = [&](int expert) {
            const int first = ids ? firsts[expert] : 0, count = ids ? firsts[expert + 1] - first : n;
            return Product{weights + (ids ? expert * w->nb[2] : 0), op, ids ? places + first : nullptr,
                           Layout(count, k / T::kActs, rows, T::kMostFew, most_by_span, pitch), bytes + first * column_bytes(), extras + first * column_extras()};
        };
        int at = 0, units = 0;  // activation blocks and units of work of the products so far
        const int all = n * (k / T::kActs), begin = (int64_t)all * params->ith / params->nth,
                  end = (int64_t)all * (params->ith + 1) / params->nth;
        for (int expert = 0; expert < experts; expert++) {
            const Product p = product(expert);
            quantize(p, std::max(begin - at, 0), end - at);
            at += p.layout.n * (k / T::kActs), units += p.units();
        }
        const bool is_in_order = ids && g_stream;  // streamed experts arrive in order, so all threads work on the first one
        auto bound = [&](int thread) -> int32_t { return is_in_order && thread ? units : (int64_t)units * thread / params->nth; };
        units_of(params->ith).store({bound(params->ith), bound(params->ith + 1)}, std::memory_order_relaxed);
        g_barrier(params->threadpool);
        if (g_stream && !ids) weights = stream_slice(op, params->ith, 0);

        Range taken{};
        auto next_unit = [&] {
            if (taken.first == taken.end) taken = take(units_of(is_in_order ? 0 : params->ith), true, kClaim);
            for (int i = 1; taken.first == taken.end && i < params->nth && !is_in_order; i++)
                taken = take(units_of((params->ith + i) % params->nth), false, 1);
            return taken.first < taken.end ? taken.first++ : -1;
        };
        int expert = 0, reached = -1, before = 0;  // before: number of units of earlier experts
        bool is_start = true;
        Product p = product(0);
        for (int unit = next_unit(), after; unit >= 0; unit = after) {  // the next unit is taken early, to prefetch its weights
            after = next_unit();
            if (unit < before) before = 0, p = product(expert = 0);
            while (unit >= before + p.units()) before += p.units(), p = product(++expert);
            if (is_in_order && reached < expert) p.weights = stream_slice(op, params->ith, reached = expert);
            const int step = p.step(), row = std::min((unit - before) * step, rows - step), skipped = (unit - before) * step - row;
            const int soon = after < 0 ? row : std::clamp((after - before) * step, 0, rows - step);
            const uint8_t *from = p.weights + row * w->nb[1], *ahead = p.weights + soon * w->nb[1];
            if (is_start) {
                if (!ids) next_start() = from;
                t_starts.last = from, is_start = false;
            }
            if (after < 0 && next_start()) ahead = next_start();
            added.prefetch(soon, step);
            if (p.layout.is_by_span) compute_by_span(p, row, skipped, from, ahead, own);
            else if (p.layout.is_few) compute_few(p, row, skipped, from, ahead);
            else compute_many(p, row, skipped, from, ahead, own);
            added.add(row + skipped, step - skipped);
        }
        if (ids && g_stream) stream_slice(op, params->ith, experts);
    }

    void sort_by_expert(Place *places, int32_t *firsts) const {
        auto expert_of = [&](int slot, int token) {
            return *(const int32_t *)((const char *)ids->data + slot * ids->nb[0] + token * ids->nb[1]);
        };
        std::fill(firsts, firsts + experts + 1, 0);
        for (int token = 0; token < ids->ne[1]; token++)
            for (int slot = 0; slot < ids->ne[0]; slot++) firsts[expert_of(slot, token) + 1]++;
        for (int e = 0; e < experts; e++) firsts[e + 1] += firsts[e];
        for (int token = 0; token < ids->ne[1]; token++)
            for (int slot = 0; slot < ids->ne[0]; slot++) places[firsts[expert_of(slot, token)]++] = {slot, token};
        for (int e = experts; e > 0; e--) firsts[e] = firsts[e - 1];
        firsts[0] = 0;
    }

    void quantize(const Product &p, int begin, int end) const {
        const Layout &l = p.layout;
        end = std::min(end, l.n * l.blocks);
        if (l.is_by_span) return l.n < 2 ? quantize_spans<1>(p, begin, end) : quantize_spans<2>(p, begin, end);
        for (int i = begin; i < end; i++) {
            const int column = i / l.blocks, block = i % l.blocks;
            const size_t at = l.at(column, block);
            const int g = column / l.width, size = l.size(g);
            Extra *e = p.extras + (size_t)g * l.width * l.blocks * kSubs + (size_t)block * kSubs * size + column % l.width;
            quantize_block<T>(p.source(column) + block * T::kActs, p.bytes + at * 32, e, size);
        }
    }

    // Blocks are divided over all spans, so that threads do not write to the same cache lines
    template <int kC> void quantize_spans(const Product &p, int begin, int end) const {
        const int spans = k / kSpan;
        int32_t *x = (int32_t *)p.bytes, *scales = (int32_t *)p.extras, *seconds = scales + kSpan / T::kSub * kC * pitch;
        for (int i = begin; i < end; i++) {
            const int span = i % spans, column = i / spans % kC, block = i / spans / kC;
            int32_t dwords[8], extras[2 * kSubs];  // Extra
            quantize_block<T>(p.source(column) + span * kSpan + block * T::kActs, (int8_t *)dwords, (Extra *)extras, 1);
            for (int to = column * pitch + span; to < column * pitch + spans + kLanes; to += spans) {
                for (int j = 0; j < 8; j++) x[(block * 8 + j) * kC * pitch + to] = dwords[j];
                for (int j = 0; j < kSubs; j++) {
                    const int at = (block * kSubs + j) * kC * pitch + to;
                    scales[at] = extras[2 * j], seconds[at] = extras[2 * j + 1];
                }
            }
        }
    }

    void put(const Product &p, int column, int row, int skipped, const float *from, int lanes) const {
        memcpy(p.target(column) + row + skipped, from + skipped, (lanes - skipped) * sizeof(float));
    }

    void compute_few(const Product &p, int row, int skipped, const uint8_t *from, const uint8_t *ahead) const {
        const Layout &l = p.layout;
        alignas(64) float out[kColumns * kLanes];
        for (int g = 0; g < l.groups(); g++) {
            const size_t at = (size_t)g * l.width * l.blocks;
            const int8_t *x = p.bytes + at * 32;
            const Extra *e = p.extras + at * kSubs;
            const uint8_t *soon = g ? from : ahead;
            switch (l.size(g)) {
#define FEW(C) case C: if constexpr (C <= kColumns) few<T, C>(from, w->nb[1], k, x, e, out, soon); break;
                FEW(1) FEW(2) FEW(3) FEW(4) FEW(5) FEW(6) FEW(7) FEW(8)
            }
            for (int c = 0; c < l.size(g); c++) put(p, g * l.width + c, row, skipped, out + c * kLanes, kLanes);
        }
    }

    void compute_by_span(const Product &p, int row, int skipped, const uint8_t *from, const uint8_t *ahead, uint8_t *own) const {
        alignas(64) float out[2 * kLanes];
        if constexpr (T::kMostBySpan > 0) {
            if (p.layout.n == 1) few_by_span<T, 1>(from, k / kSpan, p.spans<T, 1>(), out, (float *)own, ahead);
            else if constexpr (T::kMostBySpan > 1) few_by_span<T, 2>(from, k / kSpan, p.spans<T, 2>(), out, (float *)own, ahead);
        }
        for (int c = 0; c < p.layout.n; c++) put(p, c, row, skipped, out + c * kLanes, kLanes);
    }

    void compute_many(const Product &p, int row, int skipped, const uint8_t *from, const uint8_t *ahead, uint8_t *own) const {
        const Layout &l = p.layout;
        auto *slab = (Unpacked<typename T::Kernels> *)own;
        float *sums = (float *)(own + slab_size());
        for (int i = 0; i < k; i += kChunk) {
            const int some = std::min(kChunk, k - i);
            const size_t done = (size_t)i / T::kGroup * T::kBytes, bytes = (size_t)some / T::kGroup * T::kBytes * kLanes;
            // Tiles of the first groups prefetch, too: with few columns, the time is that of reading memory, which must not pause
            // between two slabs.
            const int parts = 1 + std::min(l.groups(), 3), share = share_of<T> / parts;
            const uint8_t *soon = ahead + done * kRows;
            unpack<T>(from + done, w->nb[1], some, slab, soon, share);
            unpack<T>(from + done + kLanes * w->nb[1], w->nb[1], some, slab + 1, soon + bytes / parts, share);
            for (int g = 0; g < l.groups(); g++) {
                const size_t at = (size_t)g * l.width * l.blocks + (size_t)(i / T::kActs) * l.size(g);
                const int8_t *x = p.bytes + at * 32;
                const Extra *e = p.extras + at * kSubs;
                float *out = sums + g * l.width * kRows;
                const int wanted = g + 1 < parts ? 2 * share : 0;
                soon += 2 * bytes / parts;
                switch (l.size(g)) {
#define TILE(C) case C: if constexpr (C <= kTile) tile<typename T::Kernels, C>(slab, some, x, e, out, i == 0, soon, wanted); break;
                    TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
                }
            }
        }
        for (int c = 0; c < l.n; c++) put(p, c, row, skipped, sums + c * kRows, kRows);
    }
};

// Calls f with the Format of the tensor's type; returns false for unsupported types
template <class F> bool with_format(ggml_type type, F f) {
#if defined(__AVX512VNNI__)
    static const bool has_pairs = __builtin_cpu_supports("avx512bf16");
    if (type == GGML_TYPE_BF16 && has_pairs) return f(BF16Pairs{}), true;
#endif
    switch (type) {
#define FORMAT(name) case GGML_TYPE_##name: f(name{}); return true;
        FORMAT(Q4_0) FORMAT(Q4_1) FORMAT(Q5_0) FORMAT(Q5_1) FORMAT(Q8_0) FORMAT(IQ4_NL) FORMAT(MXFP4) FORMAT(Q2_K)
        FORMAT(Q3_K) FORMAT(Q4_K) FORMAT(Q5_K) FORMAT(Q6_K) FORMAT(IQ4_XS) FORMAT(F32) FORMAT(F16) FORMAT(BF16)
        default: return false;
    }
}

class MulMat : public ggml::cpu::tensor_traits {
public:
    static bool takes(const ggml_tensor *w) {
        bool is_known = false;
        with_format(w->type, [&](auto format) { is_known = w->ne[0] % decltype(format)::kGroup == 0; });
        if (!is_known || w->ne[1] < 16 || w->ne[3] != 1 || w->nb[0] != ggml_type_size(w->type)) return false;
        return !w->buffer || ggml_backend_buffer_is_host(w->buffer);  // not on a device, not repacked
    }
    static bool accepts(const ggml_tensor *op) {
        const ggml_tensor *w = op->src[0], *x = op->src[1];
        if (!takes(w) || x->type != GGML_TYPE_F32 || op->type != GGML_TYPE_F32) return false;
        if (x->nb[0] != 4 || op->nb[0] != 4 || x->ne[3] != 1) return false;
        return op->op == GGML_OP_MUL_MAT_ID || (op->op_params[1] == 0 && w->ne[2] == 1 && x->ne[2] == 1);
    }
    bool work_size(int n_threads, const ggml_tensor *op, size_t &size) override {
        plan_adapters(op, accepts(op));
        if (g_stream) stream_note(op, accepts(op));
        if (!accepts(op)) return false;
        return with_format(op->src[0]->type, [&](auto f) {
            size = round_up(Additions(op).size()) + Operation<decltype(f)>(op).work_size(n_threads);
        });
    }
    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        if (!accepts(op)) return false;
        Additions added(op);
        added.project((float *)params->wdata, params->ith, params->nth);
        ggml_compute_params rest = *params;
        rest.wdata = (char *)params->wdata + round_up(added.size());
        return with_format(op->src[0]->type, [&](auto f) { Operation<decltype(f)>(op).compute(&rest, added); });
    }
};

MulMat g_product;

}  // namespace

ggml::cpu::tensor_traits *matmul_for(const ggml_tensor *op) {
    return op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID ? &g_product : nullptr;
}
bool matmul_takes(const ggml_tensor *weight) { return MulMat::takes(weight); }
