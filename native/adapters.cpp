// LoRA adapters of single rows of a batch: each product of matmul.cpp adds scale * B (A x) to the rows that have an adapter.
//
// llama.cpp sets adapters on the whole context: four more nodes of the graph for each matrix and adapter, for all rows. Here the graph
// stays the same, rows without an adapter cost nothing, and rows with different adapters share a step. A row's bits depend only on
// its activations and its adapters: products with A are summed in 16 lanes of A's columns, products with B by rank, in order.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <unordered_map>

#include "vectors.h"

// ---- the fields used of llama.cpp's private header llama-adapter.h

struct llama_model;
struct llama_adapter_lora_weight {
    ggml_tensor *a, *b;
};
struct llama_adapter_lora {
    llama_model *model;
    std::unordered_map<std::string, llama_adapter_lora_weight> pairs;  // weight's name → its A and B
    std::vector<void *> contexts, buffers;
    float alpha;
};

namespace {

constexpr int kRanks = 4, kTokens = 8;  // ranks and tokens in a work unit of project()
constexpr int kAtOnce = 4;              // columns (rows of the batch) that add_block() computes together

// Sets to[r] to `by` times the dot product of x and row r of A
template <int kN, class T> INLINE void dots(const T *a, int k, const float *x, float by, float *to) {
    Floats sums[kN][kParts]{};
    for (int i = 0; i < k; i += kSums)
        UNROLL for (int p = 0; p < kParts; p++) {
            const Floats v = load(x + i + p * kLanes);
            UNROLL for (int r = 0; r < kN; r++) sums[r][p] = fma(load(a + (size_t)r * k + i + p * kLanes), v, sums[r][p]);
        }
    UNROLL for (int r = 0; r < kN; r++) to[r] = tree(sums[r]) * by;
}

// Adds the sum over r of b[r][lane] * t[c][r] to to[c][lane], for kC columns c and the first `lanes` lanes
template <int kC, class T> INLINE void add_block(const T *b, int rank, const float *t, float *const *to, int lanes) {
    Floats sums[kC]{};
    for (int r = 0; r < rank; r++) {
        const Floats v = load(b + r * kLanes);
        UNROLL for (int c = 0; c < kC; c++) sums[c] = fma(v, all(t[c * rank + r]), sums[c]);
    }
    UNROLL for (int c = 0; c < kC; c++)
        if (lanes == kLanes) store(to[c], load(to[c]) + sums[c]);
        else for (int i = 0; i < lanes; i++) to[c][i] += sums[c][i];
}

// Calls f with the tensor's data; returns false for unsupported types
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
    std::unordered_map<const void *, LoraPair> pairs;  // weight's address → its A and B
};

// The rows of a batch that have the same adapter: the range of all its tokens, and of those with outputs. row_adapters.py sets them.
struct Rows {
    int32_t first, n, first_output, n_outputs;
    const Adapter *adapter;
    float scale;
};

struct Column {  // a column (row of the batch) of a product
    int at;
    float scale;
};
struct Group {  // the rows with one adapter
    const Adapter *adapter;
    std::vector<Column> tokens, outputs;
};

}  // namespace

struct AdapterPlan {
    struct Run {
        const LoraPair *pair;
        const std::vector<Column> *columns;
        size_t at;  // offset in Additions::projected: [column][rank]
    };
    std::vector<Run> runs;
    size_t n_floats = 0;
    const AdapterPlan *next = nullptr;  // plan of the next product with adapters
};

namespace {

// The adapters of one llama_decode. After the last layer's attention, llama.cpp keeps only the rows with outputs.
struct Step {
    int n_tokens, n_outputs;
    bool is_whole = false, has_missed = false;  // a product of all tokens was seen; one could not add its adapters
    std::vector<Group> groups;
    std::deque<AdapterPlan> plans;
};
thread_local Step *t_step;  // the step whose graph this thread plans; ggml plans on the thread that calls llama_decode

bool takes(const ggml_tensor *weight, const ggml_tensor *a, const ggml_tensor *b) {
    const auto is_float = [](const ggml_tensor *t) { return with_type(t->type, nullptr, [](auto) {}); };
    return weight && matmul_takes(weight) && ggml_n_dims(weight) <= 2 && is_float(a) && is_float(b) && ggml_is_contiguous(a) &&
           ggml_n_dims(a) <= 2 && ggml_n_dims(b) <= 2 && a->ne[0] == weight->ne[0] && b->ne[1] == weight->ne[1] &&
           a->ne[1] == b->ne[0] && b->nb[0] == ggml_type_size(b->type) && a->ne[0] % kSums == 0;
}

}  // namespace

size_t Additions::size() const { return plan ? plan->n_floats * sizeof(float) : 0; }

void Additions::project(float *work, int ith, int nth) {
    projected = work;
    if (!plan) return;
    const ggml_tensor *x = op->src[1];
    int unit = 0;
    for (const auto &run : plan->runs) {
        const LoraPair &pair = *run.pair;
        const int rank = pair.rank, k = pair.a->ne[0], n = run.columns->size();
        for (int first = 0; first < n; first += kTokens)
            for (int r = 0; r < rank; r += kRanks) {
                if (unit++ % nth != ith) continue;
                with_type(pair.a->type, pair.a->data, [&](auto a) {
                    a += (size_t)r * k;
                    for (int c = first; c < std::min(first + kTokens, n); c++) {
                        const Column &column = (*run.columns)[c];
                        const float *from = (const float *)((const char *)x->data + column.at * x->nb[1]);
                        float *to = work + run.at + (size_t)c * rank + r, by = column.scale * pair.scale;
                        if (r + kRanks <= rank) dots<kRanks>(a, k, from, by, to);
                        else for (int i = 0; r + i < rank; i++) dots<1>(a + (size_t)i * k, k, from, by, to + i);
                    }
                });
            }
    }
}

// Prefetches to the L2 cache: prefetches to L1, or line by line between the product's blocks, cost more time than they saved.
void Additions::prefetch(int first, int n) const {
    if (!plan) return;
    const size_t rows = op->ne[0];
    auto part = [&](const void *from, size_t size) {
        for (size_t at = size * first / rows; at < size * (first + n) / rows; at += 64) __builtin_prefetch((const char *)from + at, 0, 2);
    };
    for (const auto &run : plan->runs) part(run.pair->b.data(), run.pair->b.size());
    if (plan->next)
        for (const auto &run : plan->next->runs) part(run.pair->a->data, ggml_nbytes(run.pair->a));
}

void Additions::add(int first, int n) const {
    if (!plan) return;
    for (const auto &run : plan->runs)
        with_type(run.pair->b_type, run.pair->b.data(), [&](auto b) {
            const int rank = run.pair->rank, n_columns = run.columns->size();
            for (int row = first; row < first + n; row += kLanes)
                for (int c = 0; c < n_columns; c += kAtOnce) {
                    float *to[kAtOnce];
                    const int some = std::min(kAtOnce, n_columns - c), lanes = std::min(kLanes, first + n - row);
                    for (int i = 0; i < some; i++) to[i] = (float *)((char *)op->data + (*run.columns)[c + i].at * op->nb[1]) + row;
                    const auto *from = b + (size_t)row * rank;
                    const float *t = projected + run.at + (size_t)c * rank;
                    switch (some) {
#define ADD(C) case C: add_block<C>(from, rank, t, to, lanes); break;
                        ADD(1) ADD(2) ADD(3) ADD(4)
                    }
                }
        });
}

void plan_adapters(const ggml_tensor *op, bool is_accepted) {
    void *&kept = const_cast<ggml_tensor *>(op)->extra;
    kept = nullptr;
    if (!t_step) return;
    Step &step = *t_step;
    const int n = op->src[1]->ne[1];
    const bool has_all = n == step.n_tokens;
    if (op->op == GGML_OP_MUL_MAT && has_all) step.is_whole = true;
    AdapterPlan plan;
    for (const Group &group : step.groups) {
        const auto found = group.adapter->pairs.find(op->src[0]->data);
        if (found == group.adapter->pairs.end()) continue;
        if (!is_accepted || (!has_all && (n != step.n_outputs || !step.is_whole))) step.has_missed = true;
        const auto &columns = has_all ? group.tokens : group.outputs;
        if (columns.empty()) continue;
        plan.runs.push_back({&found->second, &columns, plan.n_floats});
        plan.n_floats += columns.size() * found->second.rank;
    }
    if (plan.runs.empty() || step.has_missed) return;
    AdapterPlan *before = step.plans.empty() ? nullptr : &step.plans.back();
    kept = &step.plans.emplace_back(std::move(plan));
    if (before) before->next = &step.plans.back();
}

// ---- for runtime/llama/row_adapters.py

// Returns null if the products of matmul.cpp cannot add a part of the adapter: embeddings, experts, scaled weights, other types.
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

// Begins a step, on the thread that will call llama_decode. `rows` should be sorted by adapter, so that each adapter is read once.
extern "C" Step *edgeinfer_adapters_begin(const Rows *rows, int n_rows, int n_tokens, int n_outputs) {
    t_step = new Step{n_tokens, n_outputs};
    auto &groups = t_step->groups;
    for (const Rows *row = rows; row < rows + n_rows; row++) {
        if (groups.empty() || groups.back().adapter != row->adapter) groups.push_back({row->adapter, {}, {}});
        for (int i = 0; i < row->n; i++) groups.back().tokens.push_back({row->first + i, row->scale});
        for (int i = 0; i < row->n_outputs; i++) groups.back().outputs.push_back({row->first_output + i, row->scale});
    }
    return t_step;
}
// Ends the step after llama_decode. Returns whether every adapter was added; otherwise the logits are invalid.
extern "C" bool edgeinfer_adapters_end(Step *step) {
    t_step = nullptr;
    const bool is_complete = !step->has_missed;
    delete step;
    return is_complete;
}
