// Operations whose results in ggml depend on the instruction set: activations, softmax, the norm with a mean, state-space layers,
// and products that matmul.cpp declines. Here the results are bit-identical on every level (functions.h): a sum consists of kSums
// partial sums, each added in order; then the partial sums are added as a tree. A row's bits depend on no other rows or threads.
#include <atomic>

#include "functions.h"

namespace {

constexpr int kPiece = 512;   // elements of a row that a thread computes at a time
constexpr int kBlock = 1024;  // elements whose sums are floats; sums of blocks are doubles

// Reads n floats or halves, and zeros into the other lanes; n may be less than 1 or exceed the lanes, and usually is a constant
template <class T> INLINE Floats load_some(const T *p, int n) {
    if (n >= kLanes) return load(p);
    T some[kLanes]{};
    if (n > 0) memcpy(some, p, n * sizeof *p);
    return load(some);
}
INLINE void store_some(float *p, Floats x, int n) {
    if (n >= kLanes) return store(p, x);
    if (n > 0) memcpy(p, &x, n * sizeof(float));
}
INLINE Four four_trees(const Four &a, const Four &b, const Four &c, const Four &d) {
    const auto halves = [](Four x, Four y) { return __builtin_shufflevector(x, y, 0, 4, 1, 5) + __builtin_shufflevector(x, y, 2, 6, 3, 7); };
    const Four ab = halves(a, b), cd = halves(c, d);
    return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}
// Calls f(index of the partial sum, first element, count) for each vector of n elements from `from` on
template <class F> INLINE void each_vector(int from, int n, F f) {
    int i = from;
    for (; i + kSums <= n; i += kSums)
        UNROLL for (int p = 0; p < kParts; p++) f(p, i + p * kLanes, kLanes);
    if (i < n)
        UNROLL for (int p = 0; p < kParts; p++) f(p, i + p * kLanes, n - i - p * kLanes);
}
#define EACH_VECTOR [&](int p, int i, int n) __attribute__((always_inline))
// Sums n elements; add(sum, i, n) returns the partial sum with the vector at i
template <class F> INLINE double sum_of(int n_all, F add) {
    double total = 0;
    for (int from = 0; from < n_all; from += kBlock) {
        Floats sums[kParts]{};
        each_vector(from, std::min(n_all, from + kBlock), EACH_VECTOR { sums[p] = add(sums[p], i, n); });
        total += tree(sums);
    }
    return total;
}
#define ADDS_VECTOR [&](Floats sum, int i, int n) __attribute__((always_inline))

INLINE char *row_of(const ggml_tensor *t, int64_t row) {
    if (t->nb[2] == t->ne[1] * t->nb[1] && t->nb[3] == t->ne[2] * t->nb[2]) return (char *)t->data + row * t->nb[1];
    const int64_t i1 = row % t->ne[1], i2 = row / t->ne[1] % t->ne[2], i3 = row / t->ne[1] / t->ne[2];
    return (char *)t->data + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3];
}
bool is_floats(const ggml_tensor *t) { return !t || (t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float)); }
float parameter(const ggml_tensor *op, int i) { return load<float>(op->op_params + i); }
// Returns this thread's part of [0, n)
struct Share {
    int64_t first, end;
    Share(const ggml_compute_params *p, int64_t n) : first(n * p->ith / p->nth), end(n * (p->ith + 1) / p->nth) {}
};

// ---- UNARY (of x) and GLU (of x and g)

typedef void (*Map)(const float *x, const float *g, float *y, int n, const float *parameters);
template <class F> void map(const float *x, const float *g, float *y, int n, const float *parameters) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) store(y + i, F::of(load(x + i), load(g + i), parameters));
    if (i < n) store_some(y + i, F::of(load_some(x + i, n - i), load_some(g + i, n - i), parameters), n - i);
}

Map map_of(const ggml_tensor *op) {
#define CASE(name, result) \
    case GGML_##name: { struct F { static INLINE Floats of(Floats x, Floats g, const float *p) { return result; } }; return map<F>; }
    if (op->op == GGML_OP_UNARY)
        switch (ggml_get_unary_op(op)) {
            CASE(UNARY_OP_TANH, tanh_of(x))
            CASE(UNARY_OP_ELU, x > 0 ? x : expm1_of(x))
            CASE(UNARY_OP_SIGMOID, sigmoid_of(x))
            CASE(UNARY_OP_GELU, gelu_of(x))
            CASE(UNARY_OP_GELU_QUICK, gelu_quick_of(x))
            CASE(UNARY_OP_GELU_ERF, gelu_erf_of(x))
            CASE(UNARY_OP_SILU, silu_of(x))
            CASE(UNARY_OP_EXP, exp_of(x))
            CASE(UNARY_OP_EXPM1, expm1_of(x))
            CASE(UNARY_OP_SOFTPLUS, softplus_of(x))
            CASE(UNARY_OP_XIELU, fma(all(p[3]), x, x > 0 ? x * x * p[2] : (expm1_of(no_more(x, p[4])) - x) * p[1]))
            default: return nullptr;
        }
    switch (ggml_get_glu_op(op)) {
        CASE(GLU_OP_GEGLU, gelu_of(x) * g)
        CASE(GLU_OP_GEGLU_QUICK, gelu_quick_of(x) * g)
        CASE(GLU_OP_GEGLU_ERF, gelu_erf_of(x) * g)
        CASE(GLU_OP_SWIGLU, silu_of(x) * g)
        CASE(GLU_OP_SWIGLU_CLAMP, silu_of(no_more(x, p[3])) * no_less(no_more(g, p[3]), -p[3]))
        CASE(GLU_OP_SWIGLU_OAI, scaled_silu_of(no_more(x, p[3]), p[2]) * (no_less(no_more(g, p[3]), -p[3]) + 1.0f))
        default: return nullptr;
    }
}

void compute_map(const ggml_compute_params *params, const ggml_tensor *op) {
    const Map map = map_of(op);
    const ggml_tensor *x = op->src[0], *g = op->src[1] ? op->src[1] : x;
    const int64_t n = op->ne[0], pieces = (n + kPiece - 1) / kPiece;
    const bool has_both = op->op == GGML_OP_GLU && !op->src[1], is_swapped = has_both && op->op_params[1];
    const Share share(params, pieces * ggml_nrows(op));
    for (int64_t i = share.first; i < share.end; i++) {
        const int64_t row = i / pieces, at = i % pieces * kPiece;
        const float *from = (const float *)row_of(x, row) + at, *gate = (const float *)row_of(g, row) + at;
        map(from + (is_swapped ? n : 0), gate + (has_both && !is_swapped ? n : 0), (float *)row_of(op, row) + at,
            std::min<int64_t>(kPiece, n - at), (const float *)op->op_params);
    }
}

// ---- normalization of rows

// Calls f(row, its elements in src[0], its elements in the result) for this thread's rows
template <class F> void each_row(const ggml_compute_params *params, const ggml_tensor *op, F f) {
    const Share share(params, ggml_nrows(op));
    for (int64_t row = share.first; row < share.end; row++) f(row, (const float *)row_of(op->src[0], row), (float *)row_of(op, row));
}
void scale_row(float *y, int n, float scale) {
    for (int i = 0; i < n; i++) y[i] *= scale;
}
void compute_norm(const ggml_compute_params *params, const ggml_tensor *op) {
    const int n = op->ne[0];
    each_row(params, op, [&](int64_t, const float *x, float *y) {
        const float mean = sum_of(n, ADDS_VECTOR { return sum + load_some(x + i, n); }) / n;
        for (int i = 0; i < n; i++) y[i] = x[i] - mean;
        const float variance = sum_of(n, ADDS_VECTOR { const Floats v = load_some(y + i, n); return fma(v, v, sum); }) / n;
        scale_row(y, n, 1.0f / std::sqrt(variance + parameter(op, 0)));
    });
}

void compute_soft_max(const ggml_compute_params *params, const ggml_tensor *op) {
    const ggml_tensor *mask = op->src[1];
    const float *sinks = op->src[2] ? (const float *)op->src[2]->data : nullptr, scale = parameter(op, 0);
    const int n_all = op->ne[0];
    each_row(params, op, [&](int64_t row, const float *x, float *y) {
        int64_t head = 0;
        const char *added = nullptr;
        if (mask || sinks) {  // a router's softmax has neither
            const int64_t i1 = row % op->ne[1], i3 = row / op->ne[1] / op->ne[2];
            head = row / op->ne[1] % op->ne[2];
            if (mask) added = (const char *)mask->data + i1 * mask->nb[1] + head % mask->ne[2] * mask->nb[2] + i3 % mask->ne[3] * mask->nb[3];
        }
        const float slope = slope_of(parameter(op, 1), head, op->ne[2]);
        const bool is_half = mask && mask->type == GGML_TYPE_F16;
        float most = sinks ? sinks[head] : -INFINITY;
        Floats largest[kParts];
        for (Floats &part : largest) part = all(most);
        each_vector(0, n_all, EACH_VECTOR {
            Floats v = load_some(x + i, n) * scale;
            if (is_half) v = fma(load_some((const uint16_t *)added + i, n), all(slope), v);
            else if (mask) v = fma(load_some((const float *)added + i, n), all(slope), v);
            store_some(y + i, v, n);
            if (n >= kLanes) largest[p] = larger(largest[p], v);
            else for (int j = i; j < i + n; j++) most = std::max(most, y[j]);
        });
        for (const Floats &part : largest)
            for (int i = 0; i < kLanes; i++) most = std::max(most, part[i]);
        double sum = sinks ? exp_of(sinks[head] - most) : 0;
        sum += sum_of(n_all, ADDS_VECTOR {
            const Floats power = exp_of(load_some(y + i, n) - most);
            store_some(y + i, power, n);
            return sum + (n >= kLanes ? power : load_some(y + i, n));  // lanes after the row's end are 0
        });
        if (std::isnan(sum)) std::fill_n(y, n_all, NAN);  // e.g. all positions masked: processors differ in the sign of NaN
        else scale_row(y, n_all, 1 / sum);
    });
}

// ---- RoPE of neighbouring pairs, rounded like ggml's code that gcc compiles for x86-64. At a row's end, that code rounds differently
// on each level.

// Sets turns to the cosine and sine of each pair at a position, across to minus the sine and the cosine
void turn_pairs(const ggml_tensor *op, int position, float *turns, float *across) {
    const float *factors = op->src[2] ? (const float *)op->src[2]->data : nullptr;
    const int n = op->op_params[1];
    const float base = parameter(op, 5), scale = parameter(op, 6), yarn = parameter(op, 7), ratio = std::pow(base, -2.0f / n);
    const float size = parameter(op, 8) * (yarn ? std::fma(0.1f, std::log(1 / scale), 1.0f) : 1);
    float ramp[2], angle = position;
    ggml_rope_yarn_corr_dims(n, op->op_params[4], base, parameter(op, 9), parameter(op, 10), ramp);
    for (int i = 0; i < n; i += 2, angle *= ratio) {
        const float whole = factors ? angle / factors[i / 2] : angle, scaled = scale * whole;
        const float mix = yarn ? yarn * (1 - std::clamp((i / 2 - ramp[0]) / std::max(0.001f, ramp[1] - ramp[0]), 0.0f, 1.0f)) : 0;
        const float turn = yarn ? std::fma(scaled, 1 - mix, whole * mix) : scaled;
        turns[i] = across[i + 1] = std::cos(turn) * size, turns[i + 1] = std::sin(turn) * size, across[i] = -turns[i + 1];
    }
}
void compute_rope(const ggml_compute_params *params, const ggml_tensor *op) {
    const int32_t *positions = (const int32_t *)op->src[1]->data;
    const int n = op->op_params[1], first = op->op_params[15];
    const int64_t width = op->ne[0];
    float *turns = (float *)params->wdata + params->ith * 2 * width, *across = turns + width;
    Integers even{}, odd{};
    for (int i = 0; i < kLanes; i++) even[i] = i & ~1, odd[i] = i | 1;
    int64_t token = -1;
    each_row(params, op, [&](int64_t row, const float *x, float *y) {
        if (token != row / op->ne[1]) token = row / op->ne[1], turn_pairs(op, positions[token % op->ne[2]], turns, across);
        if (n < width && x != y) memcpy(y, x, width * sizeof(float));
        each_vector(0, n, EACH_VECTOR {
            const Floats v = load_some(x + first + i, n), some = __builtin_shuffle(v, odd) * load_some(across + i, n);
            store_some(y + first + i, fma(__builtin_shuffle(v, even), load_some(turns + i, n), some), n);
        });
    });
}

// ---- state-space layers (Mamba)

void compute_ssm_conv(const ggml_compute_params *params, const ggml_tensor *op) {
    const ggml_tensor *x = op->src[0], *w = op->src[1];
    const int taps = w->ne[0];
    const Share share(params, op->ne[0]);
    for (int64_t seq = 0; seq < op->ne[2]; seq++)
        for (int64_t token = 0; token < op->ne[1]; token++)
            for (int64_t i = share.first; i < share.end; i++) {
                const float *from = (const float *)((const char *)x->data + i * x->nb[1] + seq * x->nb[2]) + token;
                const float *weights = (const float *)((const char *)w->data + i * w->nb[1]);
                float sum = 0;
                for (int j = 0; j < taps; j++) sum = std::fma(from[j], weights[j], sum);
                ((float *)((char *)op->data + token * op->nb[1] + seq * op->nb[2]))[i] = sum;
            }
}

// Updates the rows of a head's state by a token and multiplies them with `c`. `decays`: one per element, or one for all (Mamba-2).
template <bool kIsOne, int kR>
void next_states(const float *before, float *after, int64_t size, const float *decays, float step, const float *b, const float *c, const float *x, float *y) {
    Floats sums[kR][kParts]{};
    each_vector(0, size, EACH_VECTOR {
        const Floats decay = kIsOne ? all(*decays) : exp_of(load_some(decays + i, n) * step), in = load_some(b + i, n), out = load_some(c + i, n);
        UNROLL for (int r = 0; r < kR; r++) {
            const Floats state = fma(load_some(before + r * size + i, n), decay, in * (x[r] * step));
            sums[r][p] = fma(state, out, sums[r][p]);
            store_some(after + r * size + i, state, n);
        }
    });
    UNROLL for (int r = 0; r < kR; r++) y[r] = tree(sums[r]);
}

void compute_ssm_scan(const ggml_compute_params *params, const ggml_tensor *op) {
    const ggml_tensor *s = op->src[0], *x = op->src[1], *dt = op->src[2], *a = op->src[3], *b = op->src[4], *c = op->src[5];
    const int64_t size = s->ne[0], dim = s->ne[1], n_heads = x->ne[1], group = n_heads / b->ne[1], n_tokens = x->ne[2];
    const int snapshots = op->op_params[0];
    float *states = (float *)op->data + ggml_nelements(x);  // in op->data, the new states are after the results
    const Share heads(params, n_heads);
    const auto at = [](const ggml_tensor *t, int64_t i2, int64_t i3) { return (const float *)((const char *)t->data + i2 * t->nb[2] + i3 * t->nb[3]); };
    for (int64_t seq = 0; seq < x->ne[3]; seq++) {
        const int64_t of_seq = s->nb[3] / sizeof(float);
        const float *before = (const float *)s->data + ((const int32_t *)op->src[6]->data)[seq] * of_seq;
        float *after = states + seq * of_seq;
        for (int64_t token = 0; token < n_tokens; token++, before = after) {
            const float *steps = (const float *)((const char *)dt->data + token * dt->nb[1] + seq * dt->nb[2]);
            for (int64_t head = heads.first; head < heads.end; head++) {
                const bool is_one = a->ne[0] == 1;
                const auto next = is_one ? next_states<true, 1> : next_states<false, 1>, next_four = is_one ? next_states<true, 4> : next_states<false, 4>;
                const float step = softplus_of(steps[head]), *decays = (const float *)a->data + (is_one ? head : head * size);
                const float decay = is_one ? exp_of(step * *decays) : 0;
                const float *b_row = at(b, token, seq) + head / group * size, *c_row = at(c, token, seq) + head / group * size;
                for (int64_t row = head * dim, end = row + dim; row < end; row += row + 4 <= end ? 4 : 1)
                    (row + 4 <= end ? next_four : next)(before + row * size, after + row * size, size, is_one ? &decay : decays, step, b_row, c_row,
                                                        at(x, token, seq) + row, (float *)op->data + (seq * n_tokens + token) * n_heads * dim + row);
            }
            const int64_t slot = n_tokens - 1 - token, of_head = dim * size;
            if (slot > 0 && slot < snapshots)
                memcpy(after + slot * x->ne[3] * of_seq + heads.first * of_head, after + heads.first * of_head, (heads.end - heads.first) * of_head * sizeof(float));
        }
    }
}

// ---- MUL_MAT and MUL_MAT_ID that matmul.cpp declines: few rows, odd widths, several matrices. Weights become floats.

constexpr int kTall = 4, kWide = kRegisters == 32 ? 4 : 3;  // most rows and columns whose sums fit into registers together
constexpr int kRows = 8;    // rows with which a column is multiplied while it is in the L1 cache
constexpr int kNear = 512;  // elements of kTall rows and kWide columns that stay in L1 until the next pass over them

template <int kR, int kC, class W> void dots(const W *w, size_t stride, const float *const *x, float *const *out, int k) {
    constexpr int kOnce = std::clamp(kRegisters / 2 / (kR * kC), 1, kParts), kPasses = kParts / kOnce;  // parts at a time
    Floats sums[kR][kC][kParts]{};
    for (int from = 0, n_near = kPasses > 1 ? kNear : k; from < k; from += n_near)
        UNROLL for (int pass = 0; pass < kPasses; pass++) each_vector(from, std::min(k, from + n_near), EACH_VECTOR {
            if (p / kOnce != pass) return;
            Floats v[kC];
            UNROLL for (int c = 0; c < kC; c++) v[c] = load_some(x[c] + i, n);
            UNROLL for (int r = 0; r < kR; r++) {
                const Floats weights = load_some(w + r * stride + i, n);
                UNROLL for (int c = 0; c < kC; c++) sums[r][c][p] = fma(weights, v[c], sums[r][c][p]);
            }
        });
    UNROLL for (int c = 0; c < kC; c++) {
        if constexpr (kR == 4) store(out[c], four_trees(four_of(sums[0][c]), four_of(sums[1][c]), four_of(sums[2][c]), four_of(sums[3][c])));
        else *out[c] = tree(sums[0][c]);
    }
}

size_t dots_size(const ggml_tensor *op) { return ((size_t)op->src[0]->ne[0] * kRows + kSums) * sizeof(float); }  // bytes per thread
// Multiplies n rows of weights with columns that lie `pitch` bytes apart
template <class W> void products(const W *w, size_t stride, int n, const char *x, size_t x_pitch, char *to, size_t pitch, int64_t columns, int k) {
    for (int64_t column = 0, wide; column < columns; column += wide) {
        wide = columns - column >= kWide ? kWide : 1;
        const float *in[kWide];
        float *out[kWide];
        for (int c = 0; c < wide; c++) in[c] = (const float *)(x + (column + c) * x_pitch), out[c] = (float *)(to + (column + c) * pitch);
        for (int r = 0, tall; r < n; r += tall) {
            tall = n - r >= kTall ? kTall : 1;
            auto multiply = dots<1, 1, W>;
            if (tall > 1) multiply = wide > 1 ? dots<kTall, kWide, W> : dots<kTall, 1, W>;
            else if (wide > 1) multiply = dots<1, kWide, W>;
            multiply(w + r * stride, stride, in, out, k);
            for (int c = 0; c < wide; c++) out[c] += tall;
        }
    }
}
void compute_dots(const ggml_compute_params *params, const ggml_tensor *op) {
    const ggml_tensor *w = op->src[0], *x = op->src[1], *ids = op->op == GGML_OP_MUL_MAT_ID ? op->src[2] : nullptr;
    const int64_t k = w->ne[0], groups = op->ne[2] * (ids ? op->ne[1] : op->ne[3]), n_columns = ids ? 1 : x->ne[1];
    // a router has few rows, so threads divide its columns, or the rows of a single column
    const int64_t tall = n_columns < kWide ? kTall : kRows, tiles = (w->ne[1] + tall - 1) / tall, pieces = std::clamp<int64_t>(n_columns / 32, 1, params->nth);
    float *rows = (float *)((char *)params->wdata + params->ith * dots_size(op));
    const Share share(params, groups * tiles * pieces);
    for (int64_t i = share.first; i < share.end; i++) {
        const int64_t group = i / pieces / tiles, first = i / pieces % tiles * tall, n = std::min<int64_t>(tall, w->ne[1] - first);
        const int64_t column = n_columns * (i % pieces) / pieces, columns = n_columns * (i % pieces + 1) / pieces - column;
        const char *weights = (const char *)w->data + first * w->nb[1], *from = (const char *)x->data + column * x->nb[1];
        char *to = (char *)op->data + first * sizeof(float) + column * op->nb[1];
        const int64_t major = group / op->ne[ids ? 1 : 2], minor = group % op->ne[ids ? 1 : 2];
        if (ids) {  // MUL_MAT_ID: columns are slots (an expert of a token)
            weights += load<int32_t>((const char *)ids->data + minor * ids->nb[0] + major * ids->nb[1]) * w->nb[2];
            from += minor % x->ne[1] * x->nb[1] + major * x->nb[2], to += minor * op->nb[1] + major * op->nb[2];
        } else {
            weights += minor / (x->ne[2] / w->ne[2]) * w->nb[2] + major / (x->ne[3] / w->ne[3]) * w->nb[3];
            from += minor * x->nb[2] + major * x->nb[3], to += minor * op->nb[2] + major * op->nb[3];
        }
        const auto multiply = [&](const auto *row, size_t pitch) { products(row, pitch / sizeof *row, n, from, x->nb[1], to, op->nb[1], columns, k); };
        if (w->type == GGML_TYPE_F32) multiply((const float *)weights, w->nb[1]);
        else if (w->type == GGML_TYPE_F16) multiply((const uint16_t *)weights, w->nb[1]);
        else {
            for (int r = 0; r < n; r++) ggml_get_type_traits(w->type)->to_float(weights + r * w->nb[1], rows + r * k, k);
            multiply(rows, k * sizeof(float));
        }
    }
}
bool takes_dots(const ggml_tensor *op) {
    const ggml_tensor *w = op->src[0];
    if (op->op == GGML_OP_MUL_MAT && op->op_params[1]) return false;  // the graph asks for a different precision
    if (w->nb[0] != ggml_type_size(w->type) || (w->buffer && !ggml_backend_buffer_is_host(w->buffer))) return false;
    const bool is_float = w->type == GGML_TYPE_F32 || w->type == GGML_TYPE_F16 || w->type == GGML_TYPE_BF16;
    return is_float || (w->ne[1] < 16 && ggml_get_type_traits(w->type)->to_float);  // for more rows, ggml is faster
}

// ---- choice of the operation

typedef void (*Compute)(const ggml_compute_params *, const ggml_tensor *);
Compute compute_of(const ggml_tensor *op) {
    if (!is_floats(op) || !is_floats(op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID ? op->src[1] : op->src[0])) return nullptr;
    switch (op->op) {
        case GGML_OP_UNARY: case GGML_OP_GLU: return is_floats(op->src[1]) && map_of(op) ? compute_map : nullptr;
        case GGML_OP_NORM: return compute_norm;
        case GGML_OP_SOFT_MAX: return compute_soft_max;
        case GGML_OP_ROPE: return op->op_params[2] == GGML_ROPE_TYPE_NORMAL ? compute_rope : nullptr;
        case GGML_OP_SSM_CONV: return compute_ssm_conv;
        case GGML_OP_SSM_SCAN: return compute_ssm_scan;
        case GGML_OP_MUL_MAT: case GGML_OP_MUL_MAT_ID: return takes_dots(op) ? compute_dots : nullptr;
        default: return nullptr;
    }
}

class Elementwise : public ggml::cpu::tensor_traits {
    bool work_size(int n_threads, const ggml_tensor *op, size_t &size) override {
        size = compute_of(op) == compute_dots ? n_threads * dots_size(op) : op->op == GGML_OP_ROPE ? n_threads * 2 * op->ne[0] * sizeof(float) : 0;
        return true;
    }
    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override { return compute_of(op)(params, op), true; }
} g_elementwise;

}  // namespace

ggml::cpu::tensor_traits *elementwise_for(const ggml_tensor *op) { return compute_of(op) ? &g_elementwise : nullptr; }
