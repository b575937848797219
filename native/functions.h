// Functions of floats by fixed polynomials and explicit fma(), so that results are bit-identical with every instruction set (level).
// Errors are 1 to 3 units in the last place; NaN stays NaN.
#pragma once
#include <algorithm>
#include <cmath>

#include "vectors.h"

namespace {

INLINE Floats no_more(Floats x, float most) { return smaller(all(most), x); }
INLINE Floats no_less(Floats x, float least) { return larger(all(least), x); }
INLINE Floats size_of(Floats x) { return (Floats)((Integers)x & 0x7fffffff); }
INLINE Floats with_sign_of(Floats sign, Floats x) { return (Floats)((Integers)x | ((Integers)sign & INT32_MIN)); }
template <int n> INLINE Floats polynomial(Floats x, const float (&c)[n]) {
    Floats sum = all(c[n - 1]);
    UNROLL for (int i = n - 2; i >= 0; i--) sum = fma(sum, x, all(c[i]));
    return sum;
}
constexpr float kShift = 12582912;  // 1.5 * 2^23: adding it leaves the nearest integer in a float's lowest bits
INLINE Floats shifted_exponent(Floats x) { return fma(x, all(1.44269504f), all(kShift)); }
// Returns e^x / 2^n - 1, for an x close to n * log(2)
INLINE Floats rest_of_exp(Floats x, Floats n) {
    const Floats r = fma(n, all(-1.42860677e-6f), fma(n, all(-0.693145752f), x));
    return fma(polynomial(r, {0.49999228f, 0.16667116f, 0.041890550f, 0.0083124777f}), r * r, r);
}
// Like exp_of, but scales by 2^n in two steps, because a float cannot hold every 2^n; subnormal results are rounded once
__attribute__((noinline)) Floats exp_of_any(Floats x) {
    x = no_more(no_less(x, -104), 89);
    const Floats shifted = shifted_exponent(x);
    const Integers n = (Integers)shifted - (Integers)all(kShift), half = n >> 1;
    const Floats first = (Floats)((half + 127) << 23), second = (Floats)((n - half + 127) << 23);
    return fma(rest_of_exp(x, shifted - kShift), first, first) * second;
}
// Returns e^x; 0 from -104 down, infinite from 89 up
INLINE Floats exp_of(Floats x) {
    const Floats shifted = shifted_exponent(x), n = shifted - kShift;
    if (__builtin_expect(exceed(size_of(n), 126), false)) return exp_of_any(x);
    const Floats power = (Floats)(((Integers)shifted << 23) + (127 << 23));
    return fma(rest_of_exp(x, n), power, power);
}
INLINE Floats tanh_of(Floats x) {
    const Floats square = x * x, size = size_of(x);
    const Floats p = polynomial(square, {-0.33333281f, 0.13331425f, -0.053737614f, 0.020630410f, -0.0056935186f});
    const Floats large = 1.0f - 2.0f / (exp_of(size + size) + 1.0f);
    return size < 0.625f ? fma(square * x, p, x) : with_sign_of(x, large);
}
INLINE Floats expm1_of(Floats x) {
    const Floats half = tanh_of(x * 0.5f);
    return size_of(x) < 0.5f ? (half + half) / (1.0f - half) : exp_of(x) - 1.0f;
}
INLINE Floats sigmoid_of(Floats x) { return 1.0f / (exp_of(-x) + 1.0f); }
INLINE Floats silu_of(Floats x) { return x / (exp_of(-x) + 1.0f); }
INLINE Floats scaled_silu_of(Floats x, float scale) { return x / (exp_of(x * -scale) + 1.0f); }
INLINE Floats gelu_of(Floats x) {  // x / 2 * (1 + tanh(u)) is x * sigmoid(2 u)
    return x / (exp_of(-x * fma(x * x, all(0.0713548163f), all(1.59576912f))) + 1.0f);
}
INLINE Floats gelu_quick_of(Floats x) { return scaled_silu_of(x, 1.702f); }
INLINE Floats gelu_erf_of(Floats x) {  // by erfc(|x / sqrt(2)|) = e^(-x^2 / 2) * t * a polynomial of t
    const Floats z = size_of(x) * 0.707106781f, t = 1.0f / fma(z, all(0.5f), all(1.0f));
    const Floats p = polynomial(t, {0.28208789f, 0.28232983f, 0.24361412f, 0.19986789f, -0.017903311f, 0.26222688f, -0.47045618f,
                                    0.27505022f, -0.056817207f});
    const Floats tail = exp_of(-z * z) * t * p * 0.5f;
    return x > 0 ? fma(-x, tail, x) : x * tail;
}
INLINE Floats softplus_of(Floats x) {  // log(1 + e^x) = max(x, 0) + log(1 + y), which is 2 atanh(y / (2 + y))
    const Floats y = exp_of(-size_of(x)), s = y / (y + 2.0f), square = s * s;
    const Floats p = polynomial(square, {0.33333206f, 0.20010886f, 0.13998932f, 0.14015637f});
    return no_less(x, 0) + 2.0f * fma(square * s, p, s);
}
INLINE float exp_of(float x) { return exp_of(all(x))[0]; }
INLINE float softplus_of(float x) { return softplus_of(all(x))[0]; }

// Returns ALiBi's slope of a head, by which its mask is multiplied: a power of 2 with a fractional exponent
inline float slope_of(float bias, int head, int n_heads) {
    if (bias <= 0) return 1;
    int most = 1;
    while (2 * most <= n_heads) most *= 2;
    const float exponent = head < most ? -bias / most * (head + 1) : -bias / 2 / most * (2 * (head - most) + 1);
    const int whole = std::nearbyint(exponent);
    return std::ldexp(exp_of((exponent - whole) * 0.693147181f), whole);
}

}  // namespace
