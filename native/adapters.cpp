// LoRA adapters of single rows of a batch: each product of matmul.cpp adds scale * B (A x) to the rows that have one.
//
// llama.cpp sets adapters on the whole context: four more nodes of the graph for each matrix and adapter, for all rows. Here the
// graph stays as it is, rows without an adapter cost nothing, and rows with different ones share a step. A row's bits depend on
// its activations and on its adapters alone: sums go through the columns of A by 16 lanes, and through the ranks in order.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
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

// dots[r] of x and the rows r of A, `by` times
template <int kN, class T> INLINE void dots(const T *a, int k, const float *x, float by, float *to) {
    Floats sums[kN][kParts]{};
    for (int i = 0; i < k; i += kSums)
        for (int p = 0; p < kParts; p++) {
            const Floats v = load(x + i + p * kLanes);
            for (int r = 0; r < kN; r++) sums[r][p] = fma(load(a + (size_t)r * k + i + p * kLanes), v, sums[r][p]);
        }
    for (int r = 0; r < kN; r++) {
        float part[kSums];
        memcpy(part, sums[r], sizeof part);
        for (int half = kSums / 2; half; half /= 2)
            for (int i = 0; i < half; i++) part[i] += part[i + half];
        to[r] = part[0] * by;
    }
}

// to[lane] += the sum of b[rank][lane] * t[rank]; `lanes` of them are there
template <class T> INLINE void add_block(const T *b, int rank, const float *t, float *to, int lanes) {
    Floats sum{};
    for (int r = 0; r < rank; r++) sum = fma(load(b + r * kLanes), all(t[r]), sum);
    if (lanes == kLanes) sum += load(to), memcpy(to, &sum, sizeof sum);
    else for (int i = 0; i < lanes; i++) to[i] += sum[i];
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
    const ggml_tensor *a;
    ggml_type b_type;
    int rank;
    float scale;  // alpha / rank
    std::vector<uint8_t> b;

    LoraPair(const ggml_tensor *a, const ggml_tensor *from, float alpha)
        : a(a), b_type(from->type), rank(a->ne[1]), scale(alpha ? alpha / rank : 1) {
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

struct Adapter {
    std::unordered_map<const void *, LoraPair> pairs;  // by the weight's address
};

// Rows of a batch that have an adapter: its tokens, and those of them that have outputs. Filled in by Python.
struct Rows {
    int32_t first, n, first_output, n_outputs;
    const Adapter *adapter;
    float scale;
};

// One llama_decode. Behind the last layer's attention llama.cpp keeps the rows with outputs alone.
struct Step {
    const Rows *rows;
    int n_rows, n_tokens, n_outputs;
    std::atomic<bool> is_whole, has_missed;  // a product with all tokens was there; one with neither number of rows
};
std::atomic<int> g_n_steps;
std::shared_mutex g_mutex;
std::vector<Step *> g_steps;      // of several models in one process
thread_local Step *t_planned;  // the one that this thread plans: ggml plans in the thread that decodes

template <class F> void each_match(const ggml_tensor *weight, F f) {
    if (!g_n_steps.load(std::memory_order_acquire)) return;
    std::shared_lock lock(g_mutex);
    for (Step *step : g_steps)
        for (int i = 0; i < step->n_rows; i++) {
            const auto &pairs = step->rows[i].adapter->pairs;
            if (auto found = pairs.find(weight->data); found != pairs.end()) f(*step, step->rows[i], found->second);
        }
}

bool takes(const ggml_tensor *weight, const ggml_tensor *a, const ggml_tensor *b) {
    const auto is_float = [](const ggml_tensor *t) { return with_type(t->type, nullptr, [](auto) {}); };
    return weight && matmul_takes(weight) && ggml_n_dims(weight) <= 2 && is_float(a) && is_float(b) && ggml_is_contiguous(a) &&
           ggml_n_dims(a) <= 2 && ggml_n_dims(b) <= 2 && a->ne[0] == weight->ne[0] && b->ne[1] == weight->ne[1] &&
           a->ne[1] == b->ne[0] && b->nb[0] == ggml_type_size(b->type) && a->ne[0] % kSums == 0;
}

}  // namespace

Additions::Additions(const ggml_tensor *op) : op(op) {
    const int n = op->src[1]->ne[1];
    each_match(op->src[0], [&](Step &step, const Rows &rows, const LoraPair &pair) {
        if (n != step.n_tokens && (n != step.n_outputs || !step.is_whole)) {
            step.has_missed = true;
            return;
        }
        const bool is_whole = n == step.n_tokens;
        const int first = is_whole ? rows.first : rows.first_output, count = is_whole ? rows.n : rows.n_outputs;
        const bool is_known = std::any_of(runs.begin(), runs.end(), [&](const Run &run) { return run.pair == &pair; });
        runs.push_back({&pair, rows.scale * pair.scale, first, count, n_floats, !is_known});
        n_floats += (size_t)count * pair.rank;
    });
}

void Additions::project(float *work, int ith, int nth) {
    projected = work;
    const ggml_tensor *x = op->src[1];
    int unit = 0;
    for (const Run &run : runs) {
        const int rank = run.pair->rank, k = run.pair->a->ne[0];
        for (int first = 0; first < run.n; first += kTokens)
            for (int r = 0; r < rank; r += kRanks) {
                if (unit++ % nth != ith) continue;
                with_type(run.pair->a->type, run.pair->a->data, [&](auto a) {
                    a += (size_t)r * k;
                    for (int c = first; c < std::min(first + kTokens, run.n); c++) {
                        const float *column = (const float *)((const char *)x->data + (run.first + c) * x->nb[1]);
                        float *to = work + run.at + (size_t)c * rank + r;
                        if (r + kRanks <= rank) dots<kRanks>(a, k, column, run.scale, to);
                        else for (int i = 0; r + i < rank; i++) dots<1>(a + (size_t)i * k, k, column, run.scale, to + i);
                    }
                });
            }
    }
}

void Additions::prefetch(int first, int n) const {
    for (const Run &run : runs) {
        if (!run.is_first) continue;
        const size_t row_size = ggml_type_size(run.pair->b_type) * run.pair->rank;
        const uint8_t *b = run.pair->b.data() + first * row_size;
        for (size_t i = 0; i < n * row_size; i += 64) __builtin_prefetch(b + i);
    }
}

void Additions::add(int first, int n) const {
    for (const Run &run : runs)
        with_type(run.pair->b_type, run.pair->b.data(), [&](auto b) {
            const int rank = run.pair->rank;
            for (int row = first; row < first + n; row += kLanes)
                for (int c = 0; c < run.n; c++) {
                    float *to = (float *)((char *)op->data + (run.first + c) * op->nb[1]) + row;
                    add_block(b + (size_t)row * rank, rank, projected + run.at + (size_t)c * rank, to, std::min(kLanes, first + n - row));
                }
        });
}

void plan_adapters(const ggml_tensor *op, bool is_accepted) {
    if (t_planned && op->op == GGML_OP_MUL_MAT && op->src[1]->ne[1] == t_planned->n_tokens) t_planned->is_whole = true;
    if (!is_accepted) each_match(op->src[0], [](Step &step, const Rows &, const LoraPair &) { step.has_missed = true; });
}

// ---- for runtime/llama/lora.py

// Null if a part of the adapter is not for the products of matmul.cpp: embeddings, experts, scaled weights, other types.
extern "C" Adapter *edgeinfer_adapter_open(const llama_adapter_lora *from, const ggml_tensor *(*tensor)(const llama_model *, const char *)) {
    auto adapter = new Adapter;
    for (const auto &[name, pair] : from->pairs) {
        const ggml_tensor *weight = tensor(from->model, name.c_str());
        const std::string scale = name.substr(0, name.rfind('.')) + ".scale";
        if (name == "token_embd.weight" || tensor(from->model, scale.c_str()) || !takes(weight, pair.a, pair.b)) {
            delete adapter;
            return nullptr;
        }
        adapter->pairs.emplace(weight->data, LoraPair(pair.a, pair.b, from->alpha));
    }
    return adapter;
}
extern "C" void edgeinfer_adapter_close(Adapter *adapter) { delete adapter; }

// Around a llama_decode, in its thread. `rows` stay there until the end.
extern "C" Step *edgeinfer_adapters_begin(const Rows *rows, int n_rows, int n_tokens, int n_outputs) {
    std::unique_lock lock(g_mutex);
    t_planned = new Step{rows, n_rows, n_tokens, n_outputs, {false}, {false}};
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
