// LoRA adapters of single rows of a batch: each product of matmul.cpp adds scale * B (A x) to the rows that have one.
//
// llama.cpp sets adapters on the whole context: four more nodes of the graph for each matrix and adapter, for all rows. Here the
// graph stays as it is, rows without an adapter cost nothing, and rows with different ones share a step. A row's bits depend on
// its activations and on its adapters alone: sums go through the columns of A by 16 lanes, and through the ranks in order.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>

#include "vectors.h"

// ---- the parts of llama.cpp's private headers that are read (llama-adapter.h)

struct llama_model;
struct llama_adapter_lora_weight {
    ggml_tensor *a, *b;
};
struct llama_adapter_lora {
    llama_model *model;
    std::unordered_map<std::string, llama_adapter_lora_weight> pairs;  // by the weight's name
    std::vector<void *> contexts, buffers;
    float alpha;
};

namespace {

INLINE Floats load(const float *p) { return load<Floats>(p); }
INLINE Floats load(const ggml_fp16_t *p) { return from_halves(p); }
INLINE Floats load(const ggml_bf16_t *p) { return from_bf16(p); }
constexpr int kSums = 16, kParts = kSums / kLanes;  // partial sums of a dot, on every processor
constexpr int kRanks = 4, kTokens = 8;              // of a unit of project()
constexpr int kAtOnce = 4;                          // columns of add_blocks()

// the sum of n floats: halves are added until one is left
template <int n, class V> INLINE float sum_of(V x) {
    if constexpr (n == 1) {
        return x[0];
    } else {
        typedef float Half __attribute__((vector_size(2 * n)));
        Half low, high;
        memcpy(&low, &x, sizeof low), memcpy(&high, (const char *)&x + sizeof low, sizeof high);
        return sum_of<n / 2>(low + high);
    }
}

// dots[r] of x and the rows r of A, `by` times
template <int kN, class T> INLINE void dots(const T *a, int k, const float *x, float by, float *to) {
    Floats sums[kN][kParts]{};
    for (int i = 0; i < k; i += kSums)
        UNROLL for (int p = 0; p < kParts; p++) {
            const Floats v = load(x + i + p * kLanes);
            UNROLL for (int r = 0; r < kN; r++) sums[r][p] = fma(load(a + (size_t)r * k + i + p * kLanes), v, sums[r][p]);
        }
    UNROLL for (int r = 0; r < kN; r++) {
        UNROLL for (int n = kParts / 2; n; n /= 2)
            UNROLL for (int p = 0; p < n; p++) sums[r][p] += sums[r][p + n];
        to[r] = sum_of<kLanes>(sums[r][0]) * by;
    }
}

INLINE void add_to(float *to, Floats x, int n) {
    if (n >= kLanes) return store(to, load(to) + x);
    float some[kLanes];
    store(some, x);
    for (int i = 0; i < n; i++) to[i] += some[i];
}

// to[c][row] += the sum of b[rank][row] * t[c][rank], for kC columns and the `n` rows of kB blocks
template <int kB, int kC, class T> INLINE void add_blocks(const T *b, int rank, const float *t, float *const *to, int n) {
    Floats sums[kC][kB]{};
    for (int r = 0; r < rank; r++) {
        Floats v[kB];
        UNROLL for (int i = 0; i < kB; i++) v[i] = load(b + (i * rank + r) * kLanes);
        UNROLL for (int c = 0; c < kC; c++)
            UNROLL for (int i = 0; i < kB; i++) sums[c][i] = fma(v[i], t[c * rank + r] - Floats{}, sums[c][i]);  // x + 0 is an addition
    }
    UNROLL for (int c = 0; c < kC; c++)
        UNROLL for (int i = 0; i < kB; i++) add_to(to[c] + i * kLanes, sums[c][i], n - i * kLanes);
}

// f of the tensor's data; false for types that are not taken
template <class F> bool with_type(ggml_type type, const void *data, F f) {
    switch (type) {
        case GGML_TYPE_F32: f((const float *)data); return true;
        case GGML_TYPE_F16: f((const ggml_fp16_t *)data); return true;
        case GGML_TYPE_BF16: f((const ggml_bf16_t *)data); return true;
        default: return false;
    }
}

}  // namespace

// A and B of one weight. B is a copy by blocks of rows, [block][rank][lane], so that rows are lanes.
struct LoraPair {
    const void *a;
    ggml_type a_type, b_type;
    int k, rank;
    float scale;  // alpha / rank
    std::vector<uint8_t> b;

    LoraPair(const ggml_tensor *a, const ggml_tensor *from, float alpha)
        : a(a->data), a_type(a->type), b_type(from->type), k(a->ne[0]), rank(a->ne[1]), scale(alpha ? alpha / rank : 1) {
        const size_t size = ggml_type_size(b_type), rows = from->ne[1];
        b.resize((rows + kLanes - 1) / kLanes * kLanes * rank * size);
        for (size_t row = 0; row < rows; row++)
            for (int r = 0; r < rank; r++) {
                const size_t at = (row / kLanes * rank + r) * kLanes + row % kLanes;
                memcpy(b.data() + at * size, (const uint8_t *)from->data + row * from->nb[1] + r * size, size);
            }
    }
};

namespace {

// Sorted, for fewer cache misses: hash tables took 0.7 ms of a step of four adapters of 210 matrices, this takes 0.2 ms.
struct Adapter {
    std::vector<const void *> weights;
    std::vector<LoraPair> pairs;  // of those

    const LoraPair *find(const void *weight) const {
        const auto found = std::lower_bound(weights.begin(), weights.end(), weight);
        return found != weights.end() && *found == weight ? &pairs[found - weights.begin()] : nullptr;
    }
};

// Rows of a batch that have an adapter: its tokens, and those of them that have outputs. Filled in by Python.
struct Rows {
    int32_t first, n, first_output, n_outputs;
    const Adapter *adapter;
    float scale;
};
struct Column {  // of a product
    int at;
    float scale;
};
struct Group {  // the rows with one adapter
    const Adapter *adapter;
    std::vector<Column> tokens, outputs;
};

}  // namespace

struct PlannedAdditions {
    struct Run {
        const LoraPair *pair;
        const std::vector<Column> *columns;
        size_t at;  // in Additions::projected: [column][rank]
    };
    std::vector<Run> runs;
    size_t n_floats = 0;
    const PlannedAdditions *next = nullptr;  // those of the next product that has some
};

namespace {

// One llama_decode. Behind the last layer's attention llama.cpp keeps the rows with outputs alone.
struct Step {
    std::vector<Group> groups;
    int n_tokens, n_outputs;
    bool is_whole = false, has_missed = false;  // a product with all tokens was there; one with neither number of rows
    std::unordered_map<const ggml_tensor *, PlannedAdditions> planned;
    PlannedAdditions *last = nullptr;

    Step(const Rows *rows, int n_rows, int n_tokens, int n_outputs) : n_tokens(n_tokens), n_outputs(n_outputs) {
        for (const Rows *row = rows; row < rows + n_rows; row++) {
            if (groups.empty() || groups.back().adapter != row->adapter) groups.push_back({row->adapter, {}, {}});
            for (int i = 0; i < row->n; i++) groups.back().tokens.push_back({row->first + i, row->scale});
            for (int i = 0; i < row->n_outputs; i++) groups.back().outputs.push_back({row->first_output + i, row->scale});
        }
    }
};
std::atomic<int> g_n_steps;
std::shared_mutex g_mutex;
std::vector<Step *> g_steps;      // of several models in one process
thread_local Step *t_planned;  // the one that this thread plans: ggml plans in the thread that decodes
const PlannedAdditions kNone;

bool takes(const ggml_tensor *weight, const ggml_tensor *a, const ggml_tensor *b) {
    const auto is_float = [](const ggml_tensor *t) { return with_type(t->type, nullptr, [](auto) {}); };
    return weight && matmul_takes(weight) && ggml_n_dims(weight) <= 2 && is_float(a) && is_float(b) && ggml_is_contiguous(a) &&
           ggml_n_dims(a) <= 2 && ggml_n_dims(b) <= 2 && a->ne[0] == weight->ne[0] && b->ne[1] == weight->ne[1] &&
           a->ne[1] == b->ne[0] && b->nb[0] == ggml_type_size(b->type) && a->ne[0] % kSums == 0;
}

}  // namespace

Additions::Additions(const ggml_tensor *op) : op(op), planned(&kNone) {
    if (!g_n_steps.load(std::memory_order_acquire)) return;
    std::shared_lock lock(g_mutex);
    for (const Step *step : g_steps)
        if (auto found = step->planned.find(op); found != step->planned.end()) planned = &found->second;
}

size_t Additions::size() const { return planned->n_floats * sizeof(float); }

void Additions::project(float *work, int ith, int nth) {
    projected = work;
    const ggml_tensor *x = op->src[1];
    int unit = 0;
    for (const auto &[pair, columns, at] : planned->runs) {
        const int rank = pair->rank, k = pair->k, n = columns->size();
        for (int first = 0; first < n; first += kTokens)
            for (int r = 0; r < rank; r += kRanks) {
                if (unit++ % nth != ith) continue;
                with_type(pair->a_type, pair->a, [&, columns = columns, at = at](auto a) {
                    a += (size_t)r * k;
                    for (int c = first; c < std::min(first + kTokens, n); c++) {
                        const Column &column = (*columns)[c];
                        const float *from = (const float *)((const char *)x->data + column.at * x->nb[1]);
                        float *to = work + at + (size_t)c * rank + r, by = column.scale * pair->scale;
                        if (r + kRanks <= rank) dots<kRanks>(a, k, from, by, to);
                        else for (int i = 0; r + i < rank; i++) dots<1>(a + (size_t)i * k, k, from, by, to + i);
                    }
                });
            }
    }
}

void Additions::prefetch(int first, int n, int part, int n_parts) const {
    const auto &runs = planned->runs;
    const size_t n_next = planned->next ? planned->next->runs.size() : 0, rows = op->ne[0];
    for (size_t i = part; i < runs.size() + n_next; i += n_parts) {
        const LoraPair &pair = *(i < runs.size() ? runs[i] : planned->next->runs[i - runs.size()]).pair;
        const size_t size = pair.rank * (i < runs.size() ? rows * ggml_type_size(pair.b_type) : pair.k * ggml_type_size(pair.a_type));
        const char *from = i < runs.size() ? (const char *)pair.b.data() : (const char *)pair.a;
        for (size_t at = size * first / rows; at < size * (first + n) / rows; at += 64) __builtin_prefetch(from + at, 0, 2);
    }
}

void Additions::add(int first, int n) const {
    for (const auto &[pair, columns, at] : planned->runs)
        with_type(pair->b_type, pair->b.data(), [&, pair = pair, columns = columns, at = at](auto b) {
            const int rank = pair->rank, n_columns = columns->size();
            for (int row = first; row < first + n; row += 2 * kLanes)
                for (int c = 0; c < n_columns; c += kAtOnce) {
                    float *to[kAtOnce];
                    const int some = std::min(kAtOnce, n_columns - c), rows = first + n - row;
                    for (int i = 0; i < some; i++) to[i] = (float *)((char *)op->data + (*columns)[c + i].at * op->nb[1]) + row;
                    const auto *from = b + (size_t)row * rank;
                    const float *t = projected + at + (size_t)c * rank;
                    switch (some + (rows > kLanes ? kAtOnce : 0)) {
#define ADD(C) case C: add_blocks<1, C>(from, rank, t, to, rows); break; case C + kAtOnce: add_blocks<2, C>(from, rank, t, to, rows); break;
                        ADD(1) ADD(2) ADD(3) ADD(4)
                    }
                }
        });
}

void plan_adapters(const ggml_tensor *op, bool is_accepted) {
    Step *step = t_planned;
    if (!step) return;
    const int n = op->src[1]->ne[1];
    const bool has_all = n == step->n_tokens;
    if (op->op == GGML_OP_MUL_MAT && has_all) step->is_whole = true;
    PlannedAdditions planned;
    for (const Group &group : step->groups) {
        const LoraPair *pair = group.adapter->find(op->src[0]->data);
        if (!pair) continue;
        if (!is_accepted || (!has_all && (n != step->n_outputs || !step->is_whole))) step->has_missed = true;
        const auto &columns = has_all ? group.tokens : group.outputs;
        planned.runs.push_back({pair, &columns, planned.n_floats});
        planned.n_floats += columns.size() * pair->rank;
    }
    if (planned.runs.empty() || step->has_missed) return;
    std::unique_lock lock(g_mutex);
    PlannedAdditions &kept = step->planned[op] = std::move(planned);
    if (step->last) step->last->next = &kept;
    step->last = &kept;
}

// ---- for runtime/llama/lora.py

// Null if a part of the adapter is not for the products of matmul.cpp: embeddings, experts, scaled weights, other types.
extern "C" Adapter *edgeinfer_adapter_open(const llama_adapter_lora *from, const ggml_tensor *(*tensor)(const llama_model *, const char *)) {
    std::map<const void *, llama_adapter_lora_weight> sorted;
    for (const auto &[name, pair] : from->pairs) {
        const ggml_tensor *weight = tensor(from->model, name.c_str());
        const std::string scale = name.substr(0, name.rfind('.')) + ".scale";
        if (name == "token_embd.weight" || tensor(from->model, scale.c_str()) || !takes(weight, pair.a, pair.b)) return nullptr;
        sorted[weight->data] = pair;
    }
    auto adapter = new Adapter;
    for (const auto &[weight, pair] : sorted) adapter->weights.push_back(weight), adapter->pairs.emplace_back(pair.a, pair.b, from->alpha);
    return adapter;
}
extern "C" void edgeinfer_adapter_close(Adapter *adapter) { delete adapter; }

// Around a llama_decode, in its thread. Rows with one adapter are best next to each other.
extern "C" Step *edgeinfer_adapters_begin(const Rows *rows, int n_rows, int n_tokens, int n_outputs) {
    t_planned = new Step(rows, n_rows, n_tokens, n_outputs);
    std::unique_lock lock(g_mutex);
    g_steps.push_back(t_planned);
    g_n_steps.store(g_steps.size(), std::memory_order_release);
    return t_planned;
}
// True if everything was added; otherwise what was computed is of no use.
extern "C" bool edgeinfer_adapters_end(Step *step) {
    std::unique_lock lock(g_mutex);
    g_steps.erase(std::find(g_steps.begin(), g_steps.end(), step));
    g_n_steps.store(g_steps.size(), std::memory_order_release);
    t_planned = nullptr;
    const bool is_complete = !step->has_missed;
    delete step;
    return is_complete;
}
