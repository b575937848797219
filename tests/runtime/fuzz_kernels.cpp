// fuzz_kernels CASES [grid]: operations of random types, shapes, strides, threads and values, computed by the kernels that it is
// linked with, as ggml's CPU backend calls them. Each is compared with float64, and its bits with those of fewer rows and
// other numbers of threads. Prints a line each: the operation, and a digest of the result, or that it was declined.
// `grid`: then a product of each type and of 1 to 512 columns, of odd widths; softmax of rows that see nothing, and turned pairs; and
// products of one to three columns, of rows without gaps.
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "hook.h"

extern "C" void edgeinfer_kernels(std::vector<ggml_backend_buffer_type *> &(*types)(), void (*barrier)(ggml_threadpool *));
struct Piece { uint64_t at, size; const char *source; };
struct Copied { uint64_t at, size, tensor; };
struct Transfer {
    uint64_t state;
    Copied *copied;
    uint64_t n_copied, capacity;
    const Piece *pieces;
    uint64_t n_pieces, page, mapping;
    int64_t file;
    uint64_t n_bytes, n_mapped;
    void (*written)(const ggml_tensor *, int64_t first, int64_t n);
};
extern "C" void edgeinfer_cells(Transfer *);
extern "C" void edgeinfer_cells_written(const ggml_tensor *, int64_t first, int64_t n);
extern "C" void edgeinfer_cells_get(void *, const ggml_tensor *, void *, size_t offset, size_t size);
extern "C" void edgeinfer_cells_set(void *, ggml_tensor *, const void *, size_t offset, size_t size);

// llama.cpp's LoRA adapters (llama-adapter.h), and what adapters.cpp does with them
struct llama_model;
struct llama_adapter_lora_weight { ggml_tensor *a, *b; };
struct llama_adapter_lora {
    llama_model *model;
    std::unordered_map<std::string, llama_adapter_lora_weight> pairs;
    std::vector<void *> contexts, buffers;
    float alpha;
};
struct Adapter;
struct Step;
struct Rows { int32_t first, n, first_output, n_outputs; const Adapter *adapter; float scale; };
extern "C" Adapter *edgeinfer_adapter_open(const llama_adapter_lora *, const ggml_tensor *(*)(const llama_model *, const char *));
extern "C" void edgeinfer_adapter_close(Adapter *);
extern "C" Step *edgeinfer_adapters_begin(const Rows *, int n_rows, int n_tokens, int n_outputs);
extern "C" bool edgeinfer_adapters_end(Step *);

namespace {

std::string g_case;
void check(bool is_right, const char *claim) {
    if (is_right) return;
    fprintf(stderr, "%s: not so: %s\n", g_case.c_str(), claim);
    exit(1);
}

std::mt19937_64 g_random;
int between(int low, int high) { return low + g_random() % (high - low + 1); }
bool once_in(int n) { return g_random() % n == 0; }
float normal() { return std::normal_distribution<float>()(g_random); }

// A tensor whose data end where the allocation does, so that reading on is found; strides and the start are odd if `is_odd`.
struct Tensor : ggml_tensor {
    std::unique_ptr<uint8_t[]> bytes;
    Tensor(ggml_type kind, std::vector<int64_t> shape, bool is_odd = false) : ggml_tensor{} {
        type = kind;
        shape.resize(4, 1);
        size_t stride = ggml_type_size(kind);
        const size_t unit = kind == GGML_TYPE_F32 || kind == GGML_TYPE_I32 ? 4 : 2;
        nb[0] = stride;
        for (int i = 0; i < 4; i++) {
            ne[i] = shape[i];
            stride = i ? stride * shape[i] : ggml_row_size(kind, shape[0]);
            if (is_odd && i < 3) stride += unit * between(0, 9);
            if (i < 3) nb[i + 1] = stride;
        }
        size_t size = ggml_row_size(kind, ne[0]);
        for (int i = 1; i < 4; i++) size += ne[i] ? (ne[i] - 1) * nb[i] : 0;
        const size_t skipped = is_odd ? unit * between(0, 7) : 0;
        bytes.reset(new uint8_t[skipped + size]());
        data = bytes.get() + skipped;
    }
    char *at(int64_t i1, int64_t i2 = 0, int64_t i3 = 0) const { return (char *)data + i1 * nb[1] + i2 * nb[2] + i3 * nb[3]; }
};
std::vector<float> floats_of(ggml_type kind, const char *row, int64_t n) {
    std::vector<float> out(n);
    if (kind == GGML_TYPE_F32) memcpy(out.data(), row, n * 4);
    else ggml_get_type_traits(kind)->to_float(row, out.data(), n);
    return out;
}
void put_floats(ggml_type kind, char *row, const std::vector<float> &values) {
    if (kind == GGML_TYPE_F32) memcpy(row, values.data(), values.size() * 4);
    else ggml_quantize_chunk(kind, values.data(), row, 0, 1, values.size(), nullptr);
}

std::vector<ggml_backend_buffer_type *> g_types;
std::vector<ggml_backend_buffer_type *> &types() { return g_types; }
void barrier(ggml_threadpool *pool) { pthread_barrier_wait((pthread_barrier_t *)pool); }

// False if the operation is declined. Planned for more threads than compute it, as ggml may.
bool compute(ggml_tensor *op, int planned, int n_threads) {
    ggml::cpu::tensor_traits *traits = nullptr;
    size_t size = 0;
    for (auto *type : g_types) {
        traits = ((ggml::cpu::extra_buffer_type *)type->context)->get_tensor_traits(op);
        if (traits && traits->work_size(planned, op, size)) break;
        traits = nullptr;
    }
    if (!traits) return false;
    std::unique_ptr<uint8_t[]> work(new uint8_t[size]);
    memset(work.get(), 0xa5, size);
    pthread_barrier_t all;
    pthread_barrier_init(&all, nullptr, n_threads);
    std::vector<std::thread> threads;
    for (int i = 0; i < n_threads; i++)
        threads.emplace_back([&, i] {
            ggml_compute_params params{i, n_threads, size, work.get(), (ggml_threadpool *)&all, false};
            check(traits->compute_forward(&params, op), "what was planned is computed");
        });
    for (auto &thread : threads) thread.join();
    pthread_barrier_destroy(&all);
    return true;
}

typedef std::vector<float> Row;
// the bits of a row; all NaN are one
Row read_row(const char *from, int64_t n) {
    Row row(n);
    memcpy(row.data(), from, n * 4);
    for (float &x : row)
        if (std::isnan(x)) x = NAN;
    return row;
}
void fill(const Tensor &t) {
    for (int64_t row = 0; row < t.ne[1] * t.ne[2] * t.ne[3]; row++) {
        Row values(t.ne[0]);
        for (float &x : values) x = normal();
        put_floats(t.type, t.at(row % t.ne[1], row / t.ne[1] % t.ne[2], row / t.ne[1] / t.ne[2]), values);
    }
}
std::vector<Row> rows_of(Tensor &op, int n_threads) {
    check(compute(&op, n_threads, n_threads), "it is computed");
    std::vector<Row> rows;
    for (int64_t row = 0; row < op.ne[1] * op.ne[2]; row++) rows.push_back(read_row(op.at(row % op.ne[1], row / op.ne[1]), op.ne[0]));
    return rows;
}
void name_case(const std::string &name, std::initializer_list<int> numbers) {
    g_case += name;
    for (int number : numbers) g_case += " " + std::to_string(number);
}
bool same(const Row &a, const Row &b) { return a.size() == b.size() && !memcmp(a.data(), b.data(), a.size() * 4); }
void report(const std::vector<Row> &rows) {
    uint64_t digest = 0xcbf29ce484222325;
    for (const Row &row : rows)
        for (float x : row) {
            uint32_t bits;
            memcpy(&bits, &x, 4);
            digest = (digest ^ bits) * 0x100000001b3;
        }
    printf("%s %016llx\n", g_case.c_str(), (unsigned long long)digest);
}

const ggml_type kTypes[] = {GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_Q8_0, GGML_TYPE_IQ4_NL,
                            GGML_TYPE_MXFP4, GGML_TYPE_Q2_K, GGML_TYPE_Q3_K, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K,
                            GGML_TYPE_IQ4_XS, GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16};

// What a product may differ from float64 by: activations are rounded to 1 of 254 of the largest of 32, or to BF16, floats are summed.
double tolerance(ggml_type kind, const Row &w, const Row &x) {
    const bool is_float = !ggml_get_type_traits(kind)->is_quantized;
    double sum = 0;
    for (size_t i = 0; i < x.size(); i += 32) {
        double most_w = 0, sum_w = 0, most_x = 0, sum_x = 0;
        for (size_t j = i; j < std::min(i + 32, x.size()); j++) {
            most_w = std::max(most_w, (double)std::abs(w[j])), most_x = std::max(most_x, (double)std::abs(x[j]));
            sum_w += std::abs(w[j]), sum_x += std::abs(x[j]);
        }
        if (kind == GGML_TYPE_BF16) sum += most_w * (sum_x / 256 + 32 * 1.2e-38);  // denormals count as zero
        if (!is_float) sum += sum_w * (most_x > 1e-36 ? most_x / 253.9 : most_x);
        sum += 1e-5 * most_w * sum_x;
    }
    return sum + 1e-37;
}

struct Product { int k, rows, n, experts, used; bool is_wild, is_odd, is_shared; };
Product any_product(ggml_type kind) {
    const int block = ggml_blck_size(kind), group = block == 1 ? 8 : block == 32 ? 64 : block;
    const int groups = once_in(6) ? between(1, 6000 / group) : between(1, std::max(1, 700 / group));
    const int k = groups * group - (once_in(20) ? block == 1 ? between(1, 7) : block % 256 : 0);
    const int rows = once_in(8) ? between(1, 15) : between(16, 110), experts = once_in(3) ? between(1, 6) : 0;
    const int n = once_in(12) ? 0 : once_in(3) ? between(13, 71) : between(1, 20);
    const int used = experts ? between(1, std::min(experts, 3)) : 1;
    const bool is_wild = once_in(3), is_odd = once_in(2), is_shared = experts && once_in(2);
    return {k, rows, n, experts, used, is_wild, is_odd, is_shared};
}

void product(ggml_type kind, Product shape) {
    const auto [k, rows, n, experts, used, is_wild, is_odd, is_shared] = shape;
    name_case(std::string(ggml_type_name(kind)) + (experts ? " experts" : "") + (is_wild ? " wild" : ""), {k, rows, n, experts, used});

    Tensor w(kind, {k, rows, std::max(experts, 1)}, is_odd), x(GGML_TYPE_F32, {k, is_shared || !experts ? 1 : used, n}, is_odd);
    Tensor ids(GGML_TYPE_I32, {used, n}, is_odd), out(GGML_TYPE_F32, {rows, used, n}, is_odd);
    if (!experts)
        for (Tensor *t : {&x, &out}) std::swap(t->ne[1], t->ne[2]), t->nb[1] = t->nb[2];
    fill(w);
    for (int row = 0; is_wild && row < w.ne[1] * w.ne[2]; row++)  // any bits: scales that are NaN, infinite, denormal
        for (size_t i = 0; i < ggml_row_size(kind, k); i++) w.at(row % rows, row / rows)[i] = g_random();
    auto column = [&](Tensor &t, int token, int slot) { return experts ? t.at(slot % t.ne[1], token) : t.at(token); };
    for (int token = 0; token < n; token++) {
        const float scales[] = {0, 1e-38f, 1e-45f, 1e30f, 3e-37f, NAN, INFINITY};
        const float scale = once_in(4) ? scales[between(0, 6)] : 1;
        for (int slot = 0; slot < (experts ? x.ne[1] : 1); slot++) {
            Row values(k);
            for (float &v : values) v = normal() * (std::isfinite(scale) ? scale : 1);
            if (!std::isfinite(scale)) values[between(0, k - 1)] = scale;
            put_floats(GGML_TYPE_F32, column(x, token, slot), values);
        }
        for (int slot = 0; slot < used; slot++) {
            const int expert = between(0, std::max(experts - 1, 0));
            memcpy((char *)ids.data + slot * ids.nb[0] + token * ids.nb[1], &expert, 4);
        }
    }
    out.op = experts ? GGML_OP_MUL_MAT_ID : GGML_OP_MUL_MAT;
    out.src[0] = &w, out.src[1] = &x, out.src[2] = experts ? &ids : nullptr;
    const size_t out_size = n ? column(out, n - 1, used - 1) + rows * 4 - (char *)out.data : 0;

    // the first `count` tokens from `first` on
    auto results = [&](int first, int count, int planned, int n_threads, std::vector<Row> &found) {
        Tensor *all[] = {&x, &out, &ids};
        const int dimensions[] = {experts ? 2 : 1, experts ? 2 : 1, 1};
        memset(out.data, 0x7f, out_size);
        for (int i = 0; i < 3; i++)
            all[i]->ne[dimensions[i]] = count, all[i]->data = (char *)all[i]->data + first * all[i]->nb[dimensions[i]];
        const bool is_computed = compute(&out, planned, n_threads);
        for (int i = 0; i < 3; i++)
            all[i]->ne[dimensions[i]] = n, all[i]->data = (char *)all[i]->data - first * all[i]->nb[dimensions[i]];
        found.clear();
        for (int token = first; token < first + count; token++)
            for (int slot = 0; slot < used; slot++) found.push_back(read_row(column(out, token, slot), rows));
        return is_computed;
    };
    std::vector<Row> found, again;
    if (!results(0, n, 2, 2, found)) {
        printf("%s declined\n", g_case.c_str());
        return;
    }
    report(found);
    for (int i = 0; i < 4 && n; i++) {
        const int first = between(0, n - 1), count = i ? between(1, n - first) : 1, n_threads = between(1, 4);
        check(results(first, count, n_threads + between(0, 1), n_threads, again), "a part is computed");
        for (size_t j = 0; j < again.size(); j++)
            check(same(again[j], found[first * used + j]), "a row's bits do not depend on its company or on threads");
    }
    for (int i = 0; i < n * used; i += 1 + n * used / 100) {
        int expert = 0;
        if (experts) memcpy(&expert, (char *)ids.data + i % used * ids.nb[0] + i / used * ids.nb[1], 4);
        const Row values = floats_of(GGML_TYPE_F32, column(x, i / used, i % used), k);
        for (int r = 0; r < rows; r++) {
            const Row weights = floats_of(kind, w.at(r, expert), k);
            double wanted = 0;
            for (int j = 0; j < k; j++) wanted += (double)weights[j] * values[j];
            const double allowed = tolerance(kind, weights, values), got = found[i][r];
            if (std::isfinite(wanted) && std::abs(wanted) + allowed < 1e37)
                check(is_wild || std::abs(got - wanted) <= allowed, "it is as exact as quantized activations are");
            if (!is_wild && std::any_of(values.begin(), values.end(), [](float v) { return std::isnan(v); }))
                check(std::isnan(got), "NaN stays NaN");
        }
    }
}

// a product to some rows of which two adapters add
void adapters() {
    const ggml_type kinds[] = {GGML_TYPE_Q4_0, GGML_TYPE_Q6_K, GGML_TYPE_F32}, floats[] = {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16};
    const ggml_type kind = kinds[between(0, 2)];
    const int k = 256 * between(1, 3), rows = between(16, 110), n = between(1, 30);
    name_case(std::string("adapters ") + ggml_type_name(kind), {k, rows, n});
    static Tensor *weight;
    Tensor w(kind, {k, rows}), x(GGML_TYPE_F32, {k, n}, true), out(GGML_TYPE_F32, {rows, n}, true);
    weight = &w, fill(w), fill(x);
    out.op = GGML_OP_MUL_MAT, out.src[0] = &w, out.src[1] = &x;
    const std::vector<Row> plain = rows_of(out, 2);
    std::vector<std::vector<double>> wanted(n, std::vector<double>(rows));
    for (int i = 0; i < n; i++)
        for (int j = 0; j < rows; j++) wanted[i][j] = plain[i][j];

    std::vector<Tensor> kept;  // A and B
    kept.reserve(4);
    std::vector<Adapter *> opened;
    std::vector<Rows> adapted;  // of one token each, or of some
    for (int adapter = 0; adapter < 2; adapter++) {
        const ggml_type a_kind = floats[between(0, 2)], b_kind = floats[between(0, 2)];
        const int rank = between(1, 20);
        name_case("", {a_kind, b_kind, rank});
        Tensor &a = kept.emplace_back(a_kind, std::vector<int64_t>{k, rank}), &b = kept.emplace_back(b_kind, std::vector<int64_t>{rank, rows});
        fill(a), fill(b);
        const llama_adapter_lora lora{nullptr, {{"w.weight", {&a, &b}}}, {}, {}, 8};
        opened.push_back(edgeinfer_adapter_open(&lora, [](const llama_model *, const char *name) -> const ggml_tensor * {
            return std::string(name) == "w.weight" ? weight : nullptr;
        }));
        check(opened.back(), "the adapter is taken");
        for (int first = between(0, n - 1), count; first < n; first += count + between(0, 3)) {
            count = once_in(2) ? 1 : between(1, n - first);
            adapted.push_back({first, count, 0, 0, opened.back(), 0.5f});
            for (int i = first; i < first + count; i++)
                for (int r = 0; r < rank; r++) {
                    const Row values = floats_of(GGML_TYPE_F32, x.at(i), k), row = floats_of(a_kind, a.at(r), k);
                    double projected = 0;
                    for (int j = 0; j < k; j++) projected += (double)row[j] * values[j] * 0.5 * 8 / rank;
                    for (int j = 0; j < rows; j++) wanted[i][j] += floats_of(b_kind, b.at(j), rank)[r] * projected;
                }
        }
    }
    auto added = [&](const std::vector<Rows> &some, int n_threads) {
        Step *step = edgeinfer_adapters_begin(some.data(), some.size(), n, n);
        const std::vector<Row> found = rows_of(out, n_threads);
        check(edgeinfer_adapters_end(step), "everything is added");
        return found;
    };
    const std::vector<Row> found = added(adapted, 2), again = added(adapted, 3);
    report(found);
    for (int i = 0; i < n; i++) {
        check(same(again[i], found[i]), "a row's bits do not depend on threads");
        for (int j = 0; j < rows; j++) check(std::abs(wanted[i][j] - found[i][j]) < 1e-3, "what is added is exact");
    }
    for (int i = 0; i < n; i += between(1, 10)) {
        std::vector<Rows> own;
        for (const Rows &some : adapted)
            if (some.first <= i && i < some.first + some.n) own.push_back({i, 1, 0, 0, some.adapter, some.scale});
        const std::vector<Row> alone = added(own, 1);
        check(same(alone[i], found[i]), "a row's bits do not depend on other rows' adapters");
        for (int j = 0; j < n; j++) check(j == i || same(alone[j], plain[j]), "other rows stay as they are");
    }
    const std::vector<Row> after = rows_of(out, 2);
    for (int i = 0; i < n; i++) check(same(after[i], plain[i]), "nothing is added without a step");
    for (Adapter *adapter : opened) edgeinfer_adapter_close(adapter);
}

void attention() {
    const ggml_type kinds[] = {GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_F32, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0};
    const ggml_type kind = kinds[between(0, 4)];
    const int step = ggml_blck_size(kind) == 1 ? 16 : 32, most = once_in(9) ? 600 : 256;
    const int head = step * between(1, most / step), head_v = step * between(1, most / step);
    const int heads = between(1, 3), group = once_in(4) ? between(1, 40) : between(1, 8), tokens = between(1, 24);
    const int cells = once_in(3) ? between(1, 70) : between(1, 400), streams = once_in(4) ? 2 : 1;
    const bool is_masked = !once_in(4), has_sinks = once_in(4), is_odd = once_in(2);
    name_case(std::string("attention ") + ggml_type_name(kind), {head, head_v, heads, group, tokens, cells, streams, is_masked, has_sinks});
    Tensor q(GGML_TYPE_F32, {head, tokens, heads * group, streams}, is_odd), k(kind, {head, cells, heads, streams}, is_odd);
    Tensor v(kind, {head_v, cells, heads, streams}, is_odd), mask(GGML_TYPE_F16, {cells, tokens, 1, streams}, is_odd);
    Tensor sinks(GGML_TYPE_F32, {heads * group}), out(GGML_TYPE_F32, {head_v, heads * group, tokens, streams});
    fill(q), fill(k), fill(v);
    for (int s = 0; s < streams; s++)
        for (int i = 0; i < tokens; i++)
            for (int c = 0; c < cells; c++) {
                const uint16_t added[] = {0, 0, 0xfc00, 0xbe00};  // 0, -inf, -1.5
                memcpy(mask.at(i, 0, s) + 2 * c, &added[c / 64 % 2 ? 2 : between(0, 3)], 2);
            }
    for (int i = 0; i < heads * group; i++) ((float *)sinks.data)[i] = normal();
    const float scale = 2 / std::sqrt((float)head), bias = once_in(4) ? 8 : 0, cap = once_in(4) ? 20 : 0;
    for (int i = 0; i < 3; i++) memcpy(out.op_params + i, i == 0 ? &scale : i == 1 ? &bias : &cap, 4);
    auto slope = [&](int h) {  // of a head (ALiBi)
        int most = 1;
        while (2 * most <= heads * group) most *= 2;
        return bias == 0 ? 1 : std::exp2(h < most ? -bias / most * (h + 1) : -bias / 2 / most * (2 * (h - most) + 1));
    };
    out.op = GGML_OP_FLASH_ATTN_EXT;
    out.src[0] = &q, out.src[1] = &k, out.src[2] = &v, out.src[3] = is_masked ? &mask : nullptr, out.src[4] = has_sinks ? &sinks : nullptr;
    auto results = [&](int count, int planned, int n_threads, std::vector<Row> &found) {  // of the first stream
        q.ne[1] = mask.ne[1] = out.ne[2] = count;
        const bool is_computed = compute(&out, planned, n_threads);
        found.clear();
        for (int i = 0; i < count; i++)
            for (int h = 0; h < heads * group; h++) found.push_back(read_row(out.at(h, i), head_v));
        return is_computed;
    };
    std::vector<Row> found, again;
    if (!results(tokens, 2, 2, found)) {
        check(std::max(head, head_v) > 256, "heads of up to 256 elements are computed");
        printf("%s declined\n", g_case.c_str());
        return;
    }
    report(found);
    for (int i = 0; i < 3; i++) {
        const int n_threads = between(1, 4);
        check(results(between(1, tokens), n_threads + between(0, 1), n_threads, again), "a part is computed");
        for (size_t j = 0; j < again.size(); j++) check(same(again[j], found[j]), "a row's bits do not depend on its company or on threads");
    }
    for (int i = 0; i < tokens; i++)
        for (int h = 0; h < heads * group; h++) {
            const Row query = floats_of(GGML_TYPE_F32, q.at(i, h), head);
            std::vector<double> scores(cells), wanted(head_v);
            double most = has_sinks ? ((float *)sinks.data)[h] : -INFINITY, total = 0;
            for (int c = 0; c < cells; c++) {
                const Row key = floats_of(kind, k.at(c, h / group), head);
                const float added = is_masked ? ggml_fp16_to_fp32(((ggml_fp16_t *)mask.at(i))[c]) : 0;
                for (int d = 0; d < head; d++) scores[c] += (double)query[d] * key[d];
                scores[c] *= scale;
                if (cap) scores[c] = cap * std::tanh(scores[c] / cap);
                scores[c] += added * slope(h);
                most = std::max(most, scores[c]);
            }
            if (has_sinks) total = std::exp(((float *)sinks.data)[h] - most);
            for (int c = 0; c < cells && std::isfinite(most); c++) {
                const double weight = std::exp(scores[c] - most);
                const Row value = floats_of(kind, v.at(c, h / group), head_v);
                total += weight;
                for (int d = 0; d < head_v; d++) wanted[d] += weight * value[d];
            }
            for (int d = 0; d < head_v; d++)
                check(std::abs((total ? wanted[d] / total : 0) - found[i * heads * group + h][d]) < 1e-4, "it is exact");
        }
    if (!is_masked || streams > 1) return;

    // the same cells written in this order to other places of a cache, among cells that no row sees
    std::vector<int> places(cells + between(0, 130));
    std::iota(places.begin(), places.end(), 0);
    std::shuffle(places.begin(), places.end(), g_random);
    const int64_t wide = places.size();
    Tensor keys(kind, {head, wide, heads}), values(kind, {head_v, wide, heads}), sees(GGML_TYPE_F16, {wide, tokens});
    std::fill_n((uint16_t *)sees.data, wide * tokens, 0xfc00);  // -inf
    strcpy(keys.name, "cache_k");
    for (int c = 0; c < cells; c++) {
        for (int h = 0; h < heads; h++) {
            memcpy(keys.at(places[c], h), k.at(c, h), ggml_row_size(kind, head));
            memcpy(values.at(places[c], h), v.at(c, h), ggml_row_size(kind, head_v));
        }
        for (int i = 0; i < tokens; i++) memcpy(sees.at(i) + 2 * places[c], mask.at(i) + 2 * c, 2);
        edgeinfer_cells_written(&keys, places[c], 1);
    }
    ggml_tensor view = keys;
    view.view_src = &keys;
    out.src[1] = &view, out.src[2] = &values, out.src[3] = &sees;
    check(results(tokens, 3, 2, again), "it is computed elsewhere");
    for (size_t i = 0; i < again.size(); i++) check(same(again[i], found[i]), "a row's bits do not depend on where its cells lie");
}

// an activation of random rows, alone or with a gate; a norm, a softmax
void elementwise(int kind) {
    const struct { ggml_unary_op kind; double (*exact)(double); } functions[] = {
        {GGML_UNARY_OP_TANH, [](double x) { return std::tanh(x); }},
        {GGML_UNARY_OP_ELU, [](double x) { return x > 0 ? x : std::expm1(x); }},
        {GGML_UNARY_OP_SIGMOID, [](double x) { return 1 / (1 + std::exp(-x)); }},
        {GGML_UNARY_OP_GELU, [](double x) { return x / 2 * (1 + std::tanh(0.79788456080286536 * x * (1 + 0.044715 * x * x))); }},
        {GGML_UNARY_OP_GELU_QUICK, [](double x) { return x / (1 + std::exp(-1.702 * x)); }},
        {GGML_UNARY_OP_GELU_ERF, [](double x) { return x / 2 * std::erfc(-x / std::sqrt(2.0)); }},
        {GGML_UNARY_OP_SILU, [](double x) { return x / (1 + std::exp(-x)); }},
        {GGML_UNARY_OP_EXP, [](double x) { return std::exp(x); }},
        {GGML_UNARY_OP_EXPM1, [](double x) { return std::expm1(x); }},
        {GGML_UNARY_OP_SOFTPLUS, [](double x) { return x > 30 ? x : std::log1p(std::exp(x)); }},
    };
    const struct { ggml_glu_op kind; ggml_unary_op activation; } gates[] = {
        {GGML_GLU_OP_GEGLU, GGML_UNARY_OP_GELU}, {GGML_GLU_OP_SWIGLU, GGML_UNARY_OP_SILU},
        {GGML_GLU_OP_GEGLU_ERF, GGML_UNARY_OP_GELU_ERF}, {GGML_GLU_OP_GEGLU_QUICK, GGML_UNARY_OP_GELU_QUICK},
    };
    const int n = between(1, 1500), rows = between(1, 9);
    const bool is_split = once_in(2);
    const float size = std::exp2((float)between(-6, 5));
    Tensor x(GGML_TYPE_F32, {kind == 1 && !is_split ? 2 * n : n, rows}, kind != 1), g(GGML_TYPE_F32, {n, rows});
    Tensor mask(GGML_TYPE_F16, {n, rows}), sinks(GGML_TYPE_F32, {1}), out(GGML_TYPE_F32, {n, rows}, kind != 1 && kind != 3);
    for (Tensor *t : {&x, &g, &sinks})
        for (int i = 0; i < t->ne[1]; i++)
            for (int j = 0; j < t->ne[0]; j++) ((float *)t->at(i))[j] = normal() * size;
    for (int i = 0; i < rows; i++) {
        const bool is_hidden = once_in(4);
        for (int j = 0; j < n; j++) ((uint16_t *)mask.at(i))[j] = is_hidden || (j && once_in(3)) ? 0xfc00 : 0xbe00;  // -inf, -1.5
    }
    const auto &function = functions[between(0, std::size(functions) - 1)];
    const auto &gate = gates[between(0, 3)];
    const float scale = 0.5f, bias = once_in(2) ? 8 : 0, epsilon = 1e-5f;
    const bool is_swapped = kind == 1 && !is_split && once_in(2), has_sinks = once_in(2);
    out.src[0] = &x;
    if (kind == 0) out.op = GGML_OP_UNARY, out.op_params[0] = function.kind;
    if (kind == 1) out.op = GGML_OP_GLU, out.op_params[0] = gate.kind, out.op_params[1] = is_swapped, out.src[1] = is_split ? &g : nullptr;
    if (kind == 2) out.op = GGML_OP_NORM, memcpy(out.op_params, &epsilon, 4);
    if (kind == 3) {
        out.op = GGML_OP_SOFT_MAX, out.src[1] = &mask, out.src[2] = has_sinks ? &sinks : nullptr;
        memcpy(out.op_params, &scale, 4), memcpy(out.op_params + 1, &bias, 4);
    }
    name_case(ggml_op_desc(&out), {n, rows});
    auto results = [&](int n_threads) {
        check(compute(&out, n_threads, n_threads), "it is computed");
        std::vector<Row> found;
        for (int i = 0; i < rows; i++) found.push_back(Row((float *)out.at(i), (float *)out.at(i) + n));
        return found;
    };
    const std::vector<Row> found = results(1), again = results(3);
    report(found);
    for (int i = 0; i < rows; i++) {
        check(same(found[i], again[i]), "bits do not depend on threads");
        const float *row = (float *)x.at(i), *gates_of = is_split ? (float *)g.at(i) : row + (is_swapped ? 0 : n);
        std::vector<double> exact(n);
        double sum = 0, most = has_sinks && kind == 3 ? ((float *)sinks.data)[0] : -INFINITY;
        for (int j = 0; j < n; j++) sum += row[j];
        const double mean = sum / n;
        sum = 0;
        for (int j = 0; j < n; j++) {
            if (kind == 0) exact[j] = function.exact(row[j]);
            if (kind == 1)
                for (const auto &f : functions)
                    if (f.kind == gate.activation) exact[j] = f.exact(row[j + (is_swapped ? n : 0)]) * gates_of[j];
            if (kind == 2) exact[j] = row[j] - mean, sum += exact[j] * exact[j];
            if (kind == 3) {
                exact[j] = row[j] * scale + ggml_fp16_to_fp32(((ggml_fp16_t *)mask.at(i))[j]) * (bias ? std::exp2(-bias) : 1);
                most = std::max(most, exact[j]);
            }
        }
        if (kind == 3) {
            sum = has_sinks ? std::exp(((float *)sinks.data)[0] - most) : 0;
            for (double &v : exact) v = std::exp(v - most), sum += v;
        }
        for (int j = 0; j < n; j++) {
            if (kind == 2) exact[j] /= std::sqrt(sum / n + epsilon);
            if (kind == 3) exact[j] /= sum;
            const double slack = kind < 2 ? 4e-6 * std::abs(exact[j]) + 1e-7 * std::abs(row[j]) : kind == 2 ? 4e-5 : 4e-6;
            if (!(std::abs(exact[j]) < 3e38)) check(!(std::abs(found[i][j]) < 2.9e38), "it overflows, and a row that sees nothing is NaN");
            else check(std::abs(found[i][j] - exact[j]) <= slack + 1e-37, "it is exact");
        }
    }
}

// rotary positions of pairs of neighbours, of a part of each row, with factors of frequencies and YaRN's or without
void rope() {
    const int width = 2 * between(1, 100), n = once_in(2) ? width : 2 * between(1, width / 2), first = 2 * between(0, (width - n) / 2);
    const int heads = between(1, 5), tokens = between(1, 9), long_factor = between(2, 40);
    const bool has_factors = once_in(2), is_long = once_in(2), is_odd = once_in(2);
    name_case("rope", {width, n, first, heads, tokens, has_factors, is_long});
    Tensor x(GGML_TYPE_F32, {width, heads, tokens}, is_odd), positions(GGML_TYPE_I32, {tokens}), factors(GGML_TYPE_F32, {n / 2});
    Tensor out(GGML_TYPE_F32, {width, heads, tokens}, is_odd);
    for (int i = 0; i < tokens; i++) ((int32_t *)positions.data)[i] = between(0, 300);
    for (int i = 0; i < n / 2; i++) ((float *)factors.data)[i] = 1 + std::abs(normal());
    fill(x);
    out.op = GGML_OP_ROPE, out.src[0] = &x, out.src[1] = &positions, out.src[2] = has_factors ? &factors : nullptr;
    const float base = 10000, scale = is_long ? 1.0f / long_factor : 1, of_params[] = {base, scale, (float)is_long, 1, 32, 1};
    out.op_params[1] = n, out.op_params[4] = 4096, out.op_params[15] = first;
    memcpy(out.op_params + 5, of_params, sizeof of_params);
    const std::vector<Row> found = rows_of(out, 1), again = rows_of(out, 3);
    report(found);
    float ramp[2];
    ggml_rope_yarn_corr_dims(n, 4096, base, 32, 1, ramp);
    const double size = is_long ? 1 - 0.1 * std::log(scale) : 1;
    for (int row = 0; row < heads * tokens; row++) {
        check(same(found[row], again[row]), "bits do not depend on threads");
        const float *values = (float *)x.at(row % heads, row / heads);
        for (int i = 0; i < width; i += 2) {
            const int pair = (i - first) / 2;
            const bool is_turned = i >= first && i < first + n;
            const double whole = ((int32_t *)positions.data)[row / heads] * std::pow(base, -2.0 * pair / n) / (has_factors && is_turned ? ((float *)factors.data)[pair] : 1);
            const double mix = is_long ? 1 - std::clamp((pair - ramp[0]) / std::max(0.001f, ramp[1] - ramp[0]), 0.0f, 1.0f) : 0;
            const double turn = scale * whole * (1 - mix) + whole * mix, real = is_turned ? std::cos(turn) * size : 1, imaginary = is_turned ? std::sin(turn) * size : 0;
            check(std::abs(found[row][i] - (values[i] * real - values[i + 1] * imaginary)) < 1e-3, "it is exact");
            check(std::abs(found[row][i + 1] - (values[i] * imaginary + values[i + 1] * real)) < 1e-3, "it is exact");
        }
    }
}

// a state out of cells and into others, in pieces of a file
void cells() {
    const size_t page = sysconf(_SC_PAGESIZE), size = page * between(1, 6) + between(0, 5000);
    name_case("cells", {(int)size});
    Tensor from(GGML_TYPE_I8, {(int64_t)size}), to(GGML_TYPE_I8, {(int64_t)size});
    for (size_t i = 0; i < size; i++) from.bytes[i] = g_random();
    const int file = memfd_create("state", 0);
    const size_t shift = once_in(2) ? 0 : between(0, 100), mapped = 3 * page + size;
    std::vector<char> state(size);
    char *cells = (char *)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(file >= 0 && cells != MAP_FAILED && !ftruncate(file, mapped), "a file and memory can be had");
    char *mapping = (char *)mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    to.data = cells;

    std::vector<std::pair<size_t, size_t>> parts;
    for (size_t at = 0; at < size;) {
        parts.push_back({at, std::min<size_t>(size - at, between(1, 3 * page))});
        at += parts.back().second;
    }
    std::vector<Copied> copied(between(0, parts.size()));
    Transfer transfer{(uint64_t)state.data(), copied.data(), 0, copied.size(), nullptr, 0, page, (uint64_t)mapping, once_in(4) ? -1 : file, 0, 0};
    edgeinfer_cells(&transfer);
    for (auto [at, n] : parts) edgeinfer_cells_get(nullptr, &from, state.data() + at, at, n);
    check(transfer.n_copied == parts.size() && !memcmp(state.data(), from.data, size), "the state is the cells");
    for (size_t i = 0; i < copied.size(); i++) check(copied[i].at == parts[i].first && copied[i].size == parts[i].second, "parts are noted");

    const size_t known = between(0, size);  // the file has what lies before; the rest is in the state alone
    memcpy(mapping + page + shift, state.data(), known);
    const Piece pieces[] = {{0, known, mapping + page + shift}};
    transfer.pieces = pieces, transfer.n_pieces = known ? 1 : 0;
    std::vector<char> rest = state;
    std::fill(rest.begin(), rest.begin() + known, 'x');
    uint64_t found = 0;
    transfer.state = (uint64_t)rest.data();
    for (auto [at, n] : parts) {
        const bool is_known = known && at + n <= known;
        edgeinfer_cells_set(nullptr, &to, is_known ? rest.data() + at : (memcpy(rest.data() + at, state.data() + at, n), rest.data() + at), at, n);
        found += is_known ? n : 0;
    }
    check(transfer.n_bytes == found && !memcmp(cells, state.data(), size), "the cells are the state");
    const std::vector<char> kept(mapping, mapping + mapped);
    memset(cells, 'y', size);
    check(!memcmp(mapping, kept.data(), mapped), "what is written to cells is not written to the file");
    edgeinfer_cells(nullptr);
    munmap(mapping, mapped), munmap(cells, size), close(file);
    printf("%s done\n", g_case.c_str());
}

}  // namespace

int main(int n_arguments, char **arguments) {
    edgeinfer_kernels(types, barrier);
    edgeinfer_kernels(types, barrier);
    check(g_types.size() == 2, "a second call does nothing");
    for (int i = 0; i < atoi(arguments[1]); i++) {
        g_random.seed(i);
        g_case = std::to_string(i) + " ";
        if (i % 8 == 0) attention();
        else if (i % 16 == 4) elementwise(between(0, 3));
        else if (i % 16 == 12) rope();
        else if (i % 16 == 1) cells();
        else if (i % 16 == 9) adapters();
        else {
            const ggml_type kind = kTypes[between(0, std::size(kTypes) - 1)];
            product(kind, any_product(kind));
        }
    }
    for (int i = 0; i < (n_arguments > 2 ? 16 * 8 : 0); i++) {
        const int columns[] = {1, 2, 3, 4, 8, 17, 64, 512};
        const ggml_type kind = kTypes[i / 8];
        const int block = ggml_blck_size(kind), width = block == 1 ? 8 * 23 : block == 32 ? 64 * 9 : 256 * 3;
        g_random.seed(i);
        g_case = "grid ";
        product(kind, {width, 37, columns[i % 8], 0, 1, false, true, false});
    }
    for (int i = 0; i < (n_arguments > 2 ? 24 : 0); i++) {
        g_random.seed(i);
        g_case = "row of nothing or turned ";
        if (i % 2) rope();
        else elementwise(3);
    }
    for (int i = 0; i < (n_arguments > 2 ? 16 * 4 : 0); i++) {
        g_random.seed(i);
        g_case = "rows ";
        product(kTypes[i / 4], {256 * between(1, 40), between(16, 50), i % 4 + 1, i % 4 ? 0 : 2, 1, false, false, false});
    }
}
