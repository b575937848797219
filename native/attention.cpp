// Flash attention for ggml's CPU backend, many rows at a time.
//
// ggml computes GGML_OP_FLASH_ATTN_EXT row by row if there are fewer than 64 rows, and always if the cache is
// quantized. Here the rows that read the same head of the cache (query heads of a group, tokens) are the lanes of
// vectors, so that each cell is read and converted once for all of them. A row's bits depend only on its query and on the
// cells that the row sees, in the order of writing (cell_order.cpp); not on the indices of these cells, the number of rows,
// the row's lane, or the number of threads. Masked cells add exact zeros, and sums are scaled only by powers of two, which
// rounds nothing.
//
// The online softmax is that of Milakov and Gimelshein,
// https://arxiv.org/abs/1805.02867.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "functions.h"

namespace {

constexpr int kMostVectors = kRegisters == 32 ? 5 : 3;  // most vectors of rows summed in registers

constexpr int kBlock = 64;     // number of cells whose scores are computed together
constexpr int kMostLanes = 80;  // maximum of rows computed together
constexpr int kMostHead = 256;  // most elements of a head
constexpr size_t kMostShared = 16 << 20;  // most bytes of scores that threads share
constexpr int kKeyStride = kMostHead + 16;  // distance of keys (floats): a constant, and not a power of two, which would use few sets of the cache
constexpr int kAhead = 64;
constexpr float kLowest = -2e4f;  // scores below this belong to masked cells
constexpr float kNoBase = -3e4f;  // value of base_ before the first score: less than the exponent of any score

// Returns an integer n such that e^x is 2^n times a number between 0.7 and 1.5
inline Integers exponent(Floats x) { return nearest(x * 1.44269504f); }

// Returns 2^n for n <= 0; 0 if that is below the least normal number
inline Floats power(Integers n) {
    n = n < -127 ? Integers{} - 127 : n;
    return (Floats)((n + 127) << 23);
}

// Returns e^x / 2^base, for base >= exponent(x); exactly 0 for masked cells (Cephes' expf)
inline Floats exponential(Floats x, Integers base) {
    const Integers is_seen = x > all(kLowest);
    x = larger(x, all(kLowest));
    const Integers n = exponent(x);
    const Floats whole = floats(n);
    const Floats r = x - whole * 0.693359375f - whole * -2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return (Floats)((Integers)(p * power(n - base)) & is_seen);
}

// Computes c[i][lane] = sum over k of a[i * kAI + k * ak] * b[k][lane], for kI rows of c and kN vectors of lanes; with `add`, adds
// the sum to c[i][lane]. Rows of b and c are `lanes` floats apart.
template <int kN, int kI, int kAI>
inline void product_tile(int n_k, const float *a, size_t ak, const float *b, float *c, size_t lanes, bool add) {
    Floats sums[kI][kN];
    for (int i = 0; i < kI; i++)
        for (int j = 0; j < kN; j++) sums[i][j] = add ? load(c + i * lanes + j * kLanes) : Floats{};
    for (int k = 0; k < n_k; k++, a += ak, b += lanes) {
        Floats row[kN];
#pragma GCC unroll 8
        for (int j = 0; j < kN; j++) row[j] = load(b + j * kLanes);
#pragma GCC unroll 16
        for (int i = 0; i < kI; i++) {
            const Floats x = all(a[i * kAI]);
#pragma GCC unroll 8
            for (int j = 0; j < kN; j++) sums[i][j] += x * row[j];
        }
    }
    for (int i = 0; i < kI; i++)
        for (int j = 0; j < kN; j++) store(c + i * lanes + j * kLanes, sums[i][j]);
}

template <int kN, int kI, int kAI>
void product_lanes(int n_i, int n_k, const float *a, size_t ak, const float *b, float *c, size_t lanes, bool add) {
    for (int i = 0; i < n_i; i += kI) product_tile<kN, kI, kAI>(n_k, a + i * kAI, ak, b, c + i * lanes, lanes, add);
}

// Like the function above, but only for the lanes from `low` to `high`; n_i is a multiple of 16
template <int kAI>
void product(int n_i, int n_k, const float *a, size_t ak, const float *b, float *c, size_t lanes, int low, int high,
             bool add) {
    for (int j = low; j < high;) {
        const int n = std::min((high - j) / kLanes, kMostVectors);
        switch (n) {
            case 1: product_lanes<1, kRegisters == 32 ? 16 : 8, kAI>(n_i, n_k, a, ak, b + j, c + j, lanes, add); break;
            case 2: product_lanes<2, kRegisters == 32 ? 8 : 4, kAI>(n_i, n_k, a, ak, b + j, c + j, lanes, add); break;
            case 3: product_lanes<3, kRegisters == 32 ? 8 : 4, kAI>(n_i, n_k, a, ak, b + j, c + j, lanes, add); break;
            case 4: if constexpr (kMostVectors > 3) product_lanes<4, 4, kAI>(n_i, n_k, a, ak, b + j, c + j, lanes, add); break;
            case 5: if constexpr (kMostVectors > 3) product_lanes<5, 4, kAI>(n_i, n_k, a, ak, b + j, c + j, lanes, add); break;
        }
        j += n * kLanes;
    }
}

void to_floats(ggml_type type, const char *from, float *to, int n) {
    if (type == GGML_TYPE_F16) {
        for (int i = 0; i < n; i += kLanes) store(to + i, from_halves(from + 2 * i));
    } else if (type == GGML_TYPE_Q8_0) {  // blocks of 32: a scale (f16) and 32 bytes
        for (int i = 0; i < n; i += 32, from += 34) {
            uint16_t scale;
            memcpy(&scale, from, 2);
            for (int j = 0; j < 32; j += kLanes) store(to + i + j, from_bytes(from + 2 + j) * from_half(scale));
        }
    } else if (type == GGML_TYPE_F32) {
        memcpy(to, from, n * sizeof(float));
    } else {
        ggml_get_type_traits(type)->to_float(from, to, n);
    }
}

// One attention operation: its sizes, and how threads divide it.
struct Operation {
    const ggml_tensor *q, *k, *v, *mask, *sinks;
    ggml_tensor *out;
    int key_size, value_size, n_tokens, n_heads, n_cells, group, n_streams;
    float scale, bias, cap;
    const int32_t *listed = nullptr;  // cells to sum, in order; null: all cells
    int n_summed;
    int n_chunks, lanes, n_units;  // a work unit: a chunk of the tokens × one KV head
    int n_parts;                   // if there are few units, each is divided into parts of its values, for several threads

    Operation(const ggml_tensor *op, int n_threads)
        : q(op->src[0]), k(op->src[1]), v(op->src[2]), mask(op->src[3]), sinks(op->src[4]), out((ggml_tensor *)op) {
        key_size = k->ne[0], value_size = v->ne[0], n_tokens = q->ne[1], n_heads = k->ne[2], n_cells = k->ne[1];
        group = q->ne[2] / n_heads, n_streams = q->ne[3], n_summed = n_cells;
        scale = load<float>(op->op_params), bias = load<float>(op->op_params + 1), cap = load<float>(op->op_params + 2);
        if (cap) scale /= cap;
        const int most = std::max(1, kMostLanes / group);
        n_chunks = (n_tokens + most - 1) / most;
        lanes = ((n_tokens + n_chunks - 1) / n_chunks * group + kLanes - 1) / kLanes * kLanes;
        n_units = n_chunks * n_heads * n_streams;
        const bool is_even = n_units % n_threads == 0 || n_units >= 4 * n_threads;
        const bool is_small = n_units * shared_size() * sizeof(float) <= kMostShared;
        n_parts = is_even || !is_small ? 1 : std::max(1, std::min(n_threads, value_size / 32));
    }

    void take_order(const std::vector<int32_t> *cells) {
        if (cells) listed = cells->data(), n_summed = cells->size();
    }

    static bool accepts(const ggml_tensor *op) {
        const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
        return q->type == GGML_TYPE_F32 && k->ne[0] % 16 == 0 && k->ne[0] <= kMostHead &&
               v->ne[0] % 16 == 0 && v->ne[0] <= kMostHead && v->ne[2] == k->ne[2] && k->ne[3] == q->ne[3] &&
               v->ne[3] == q->ne[3] && q->ne[2] / k->ne[2] <= kMostLanes && (!mask || mask->ne[2] == 1);
    }

    size_t scratch_size() const {  // in floats
        return (size_t)(key_size + kBlock + value_size + 2) * lanes + kBlock * (kKeyStride + value_size);
    }
    size_t shared_size() const { return (size_t)(n_cells + kBlock) * lanes; }  // floats: the scores of one unit
    size_t work_size(int n_threads) const {                                    // bytes
        return sizeof(float) * (n_threads * scratch_size() + (n_parts > 1 ? n_units * shared_size() : 0)) + 64;
    }
    const uint16_t *mask_of(int token, int stream) const {
        return (const uint16_t *)((const char *)mask->data + token * mask->nb[1] + stream % mask->ne[3] * mask->nb[3]);
    }
};

enum class Seen { none, some, every };

class Unit {
public:
    Unit(const Operation &o, int index, float *scratch) : o_(o), queries_(scratch) {
        const int chunk = index % o.n_chunks;
        head_ = index / o.n_chunks % o.n_heads, stream_ = index / o.n_chunks / o.n_heads;
        first_ = (int64_t)o.n_tokens * chunk / o.n_chunks, end_ = (int64_t)o.n_tokens * (chunk + 1) / o.n_chunks;
        scores_ = queries_ + o.key_size * o.lanes;
        keys_ = scores_ + kBlock * o.lanes;
        cells_ = keys_ + kBlock * kKeyStride;
        base_ = cells_ + kBlock * o.value_size;
        sum_ = base_ + o.lanes;
        values_ = sum_ + o.lanes;
    }

    // computes a whole unit
    void compute() {
        read_queries();
        clear(o_.value_size);
        for (int cell = 0; cell < o_.n_summed; cell += kBlock) {
            const Seen seen = look(cell);
            if (seen == Seen::none) continue;
            score(cell, seen, scores_);
            weigh(scores_, o_.value_size);
            add_values(cell, 0, o_.value_size);
        }
        write(0, o_.value_size);
    }

    // computes only the scores of one block, into memory shared by all threads
    void compute_scores(int cell, float *shared) {
        const Seen seen = look(cell);
        if (seen != Seen::none) score(cell, seen, shared + (size_t)cell * o_.lanes);
    }

    // computes one part of the values from the scores of all blocks
    void compute_part(int part, const float *shared) {
        const int pieces = o_.value_size / 32;  // quantized elements are in blocks of 32
        const int from = pieces * part / o_.n_parts * 32;
        const int to = part + 1 == o_.n_parts ? o_.value_size : pieces * (part + 1) / o_.n_parts * 32;
        clear(to - from);
        for (int cell = 0; cell < o_.n_summed; cell += kBlock) {
            if (look(cell) == Seen::none) continue;
            memcpy(scores_, shared + (size_t)cell * o_.lanes, sizeof(float) * kBlock * o_.lanes);
            weigh(scores_, to - from);
            add_values(cell, from, to - from);
        }
        write(from, to - from);
    }

    void read_queries() {
        memset(queries_, 0, (size_t)o_.key_size * o_.lanes * sizeof(float));
        for (int r = 0; r < n_rows(); r++) {
            const float *q = (const float *)((const char *)o_.q->data + token(r) * o_.q->nb[1] +
                                             head(r) * o_.q->nb[2] + stream_ * o_.q->nb[3]);
            for (int d = 0; d < o_.key_size; d++) queries_[d * o_.lanes + r] = q[d] * o_.scale;
        }
    }

private:
    int n_rows() const { return (end_ - first_) * o_.group; }
    int token(int row) const { return first_ + row / o_.group; }
    int head(int row) const { return head_ * o_.group + row % o_.group; }
    const char *at(const ggml_tensor *t, int place) const {
        const int cell = o_.listed ? o_.listed[place] : place;
        return (const char *)t->data + cell * t->nb[1] + head_ * t->nb[2] + stream_ * t->nb[3];
    }

    void clear(int n_values) {
        for (int l = 0; l < o_.lanes; l++) base_[l] = kNoBase;
        memset(sum_, 0, (size_t)(n_values + 1) * o_.lanes * sizeof(float));
    }

    int count(int cell) const { return std::min(kBlock, o_.n_summed - cell); }

    // reads `size` elements, from `first` on, of each cell of a block
    void read(const ggml_tensor *t, int cell, int first, int size, float *to, int stride) const {
        const int bytes = ggml_row_size(t->type, size), skipped = ggml_row_size(t->type, first);
        for (int c = 0; c < count(cell); c++) {
            const char *ahead = at(t, std::min(cell + c + kAhead, o_.n_summed - 1)) + skipped;
            g_prefetches_to_l1 ? prefetch_lines<3>(ahead, bytes) : prefetch_lines<2>(ahead, bytes);
            to_floats(t->type, at(t, cell + c) + skipped, to + c * stride, size);
        }
    }

    // returns the mask of a token for a block, gathered if the block is not a range of cells
    const uint16_t *mask_of(int token, int cell) const {
        return o_.listed ? masks_[token - first_] : o_.mask_of(token, stream_) + cell;
    }
    void gather_masks(int cell) {
        for (int t = first_; t < end_; t++) {
            const uint16_t *row = o_.mask_of(t, stream_);
            for (int c = 0; c < count(cell); c++) masks_[t - first_][c] = row[o_.listed[cell + c]];
        }
    }

    // returns whether any token of the unit sees cells of a block, and limits further work to the lanes of such tokens
    Seen look(int cell) {
        low_ = 0, high_ = o_.lanes;
        if (!o_.mask) return Seen::every;
        if (o_.listed) gather_masks(cell);
        int from = end_, to = first_;
        uint16_t others = 0;  // a mask value is -inf (0xfc00) for a masked cell, 0 for a visible one
        for (int t = first_; t < end_; t++) {
            const uint16_t *mask = mask_of(t, cell);
            uint16_t hidden = 0xffff;
            for (int c = 0; c < count(cell); c++) hidden &= mask[c] == 0xfc00 ? 0xffff : 0, others |= mask[c];
            if (!hidden) from = std::min(from, t), to = t + 1;
        }
        if (to == first_) return Seen::none;
        low_ = (from - first_) * o_.group / kLanes * kLanes;
        high_ = ((to - first_) * o_.group + kLanes - 1) / kLanes * kLanes;
        return others ? Seen::some : Seen::every;
    }

    void score(int cell, Seen seen, float *scores) {
        const int n = count(cell);
        read(o_.k, cell, 0, o_.key_size, keys_, kKeyStride);
        product<kKeyStride>((n + 15) / 16 * 16, o_.key_size, keys_, 1, queries_, scores, o_.lanes, low_, high_, false);
        if (o_.cap)
            for (int c = 0; c < n; c++)
                for (float *x = scores + c * o_.lanes + low_; x < scores + c * o_.lanes + high_; x += kLanes)
                    store(x, tanh_of(load(x)) * o_.cap);
        if (seen == Seen::some)
            for (int r = low_; r < std::min(high_, n_rows()); r++) {
                const uint16_t *mask = mask_of(token(r), cell);
                const float slope = slope_of(o_.bias, head(r), o_.q->ne[2]);
                for (int c = 0; c < n; c++)
                    scores[c * o_.lanes + r] = std::fma(from_half(mask[c]), slope, scores[c * o_.lanes + r]);
            }
        for (int i = n * o_.lanes; i < kBlock * o_.lanes; i++) scores[i] = -INFINITY;
    }

    // turns scores into softmax weights; if one is larger than all scores before, scales down the sums so far
    void weigh(float *scores, int n_values) {
        for (int l = low_; l < high_; l += kLanes) {
            Floats most = all(kLowest);
            for (int c = 0; c < kBlock; c++) most = larger(most, load(scores + c * o_.lanes + l));
            const Floats before = load(base_ + l), after = larger(before, floats(exponent(most)));
            const Floats shrink = power(nearest(before - after));
            const Integers base = nearest(after);
            Floats sum = load(sum_ + l) * shrink;
            for (int c = 0; c < kBlock; c++) {
                float *x = scores + c * o_.lanes + l;
                const Floats weight = exponential(load(x), base);
                store(x, weight);
                sum += weight;
            }
            store(base_ + l, after);
            store(sum_ + l, sum);
            if (!memcmp(&before, &after, sizeof before)) continue;
            for (int d = 0; d < n_values; d++) {
                float *x = values_ + d * o_.lanes + l;
                store(x, load(x) * shrink);
            }
        }
    }

    void add_values(int cell, int first, int size) {
        read(o_.v, cell, first, size, cells_, size);
        product<1>(size, count(cell), cells_, size, scores_, values_, o_.lanes, low_, high_, true);
    }

    void write(int first, int size) const {
        for (int r = 0; r < n_rows(); r++) {
            float sum = sum_[r], scale = 1;
            if (o_.sinks) {
                const float sink = ((const float *)o_.sinks->data)[head(r)], base = base_[r] * 0.69314718f;
                const float most = std::max(sink, base);
                scale = exp_of(base - most);
                sum = std::fma(sum, scale, exp_of(sink - most));
            }
            scale = sum == 0 ? 0 : scale / sum;
            float *out = (float *)((char *)o_.out->data + head(r) * o_.out->nb[1] + token(r) * o_.out->nb[2] +
                                   stream_ * o_.out->nb[3]);
            for (int d = 0; d < size; d++) out[first + d] = values_[d * o_.lanes + r] * scale;
        }
    }

    const Operation &o_;
    int head_, stream_, first_, end_;
    uint16_t masks_[kMostLanes][kBlock];
    int low_, high_;  // range of the lanes that see cells of a block
    float *queries_, *scores_, *keys_, *cells_;
    float *base_, *sum_, *values_;  // per row: exponent of the largest score; sum of weights and weighted values, in units of 2^base
};


class Attention : public ggml::cpu::tensor_traits {
    bool work_size(int n_threads, const ggml_tensor *op, size_t &size) override {
        if (!Operation::accepts(op)) return false;
        // the graph may be computed with fewer threads than planned, which divides the work differently
        size = 0;
        for (int n = 1; n <= n_threads; n++) size = std::max(size, Operation(op, n).work_size(n));
        return true;
    }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        if (!Operation::accepts(op)) return false;
        Operation o(op, params->nth);
        o.take_order(cell_order(op));
        float *work = (float *)(((uintptr_t)params->wdata + 63) / 64 * 64);
        float *scratch = work + params->ith * o.scratch_size(), *shared = work + params->nth * o.scratch_size();
        if (o.n_parts > 1) {
            compute_parts(o, params, scratch, shared);
            return true;
        }
        for (int u = params->ith; u < o.n_units; u += params->nth) Unit(o, u, scratch).compute();
        return true;
    }

    static void compute_parts(const Operation &o, ggml_compute_params *params, float *scratch, float *shared) {
        const int n_blocks = (o.n_summed + kBlock - 1) / kBlock, n = o.n_units * n_blocks;
        int unit_read = -1;
        for (int i = (int64_t)n * params->ith / params->nth; i < (int64_t)n * (params->ith + 1) / params->nth; i++) {
            Unit unit(o, i / n_blocks, scratch);
            if (unit_read != i / n_blocks) unit.read_queries();
            unit_read = i / n_blocks;
            unit.compute_scores(i % n_blocks * kBlock, shared + unit_read * o.shared_size());
        }
        g_barrier(params->threadpool);
        for (int i = params->ith; i < o.n_units * o.n_parts; i += params->nth)
            Unit(o, i / o.n_parts, scratch).compute_part(i % o.n_parts, shared + i / o.n_parts * o.shared_size());
    }
};

Attention g_attention;

}  // namespace

ggml::cpu::tensor_traits *attention_for(const ggml_tensor *op) {
    return op->op == GGML_OP_FLASH_ATTN_EXT ? &g_attention : nullptr;
}
