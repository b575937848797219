// Records the order in which the cells of a KV cache were written: for one sequence, the order of its positions.
//
// llama.cpp gives a token the lowest free cell, so a sequence that continues after a cached prefix may have cells below the prefix's.
// Sums in the order of cells' indices are then rounded differently than after a start with an empty cache. Here each written key gets
// a number, and attention.cpp sums the cells in the order of these numbers. Attention reads only the cells that a step sees, so cells
// of other sequences cost nothing (12 to 20 % less time for 300 tokens of one of four sequences of SmolLM2).
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "hook.h"

namespace {

struct Numbers {  // write order of one layer's cells; its memory grows as cells are written
    std::unique_ptr<int64_t, decltype(&free)> of_cell;
    int64_t n_cells, n_written = 0;
    explicit Numbers(int64_t n) : of_cell((int64_t *)calloc(n, sizeof(int64_t)), free), n_cells(n) {}
};
std::map<const char *, Numbers> g_numbers;  // address of a layer's keys → their numbers
std::mutex g_lock;
std::atomic<int64_t> g_n_made = 0;  // number of Numbers objects ever made

bool is_keys(const ggml_tensor *cache) { return !strncmp(cache->name, "cache_k", 7); }

Numbers &numbers_of(const ggml_tensor *keys) {
    const int64_t n = ggml_nelements(keys) / keys->ne[0];
    std::lock_guard lock(g_lock);
    const auto found = g_numbers.find((const char *)keys->data);
    if (found != g_numbers.end() && found->second.n_cells == n) return found->second;
    ++g_n_made;
    return g_numbers.insert_or_assign((const char *)keys->data, Numbers(n)).first->second;
}

class Writes : public ggml::cpu::tensor_traits {
    bool work_size(int, const ggml_tensor *, size_t &) override { return false; }
    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        if (params->ith) return false;
        const ggml_tensor *cells = op->src[1];
        Numbers &numbers = numbers_of(op->view_src);
        for (int64_t i = 0; i < ggml_nelements(cells); i++) {
            const int64_t cell = cells->type == GGML_TYPE_I64 ? ((int64_t *)cells->data)[i] : ((int32_t *)cells->data)[i];
            numbers.of_cell.get()[cell] = ++numbers.n_written;
        }
        return false;  // false: ggml itself then writes the cells
    }
};
Writes g_writes;

// Cell order of a step, shared by all layers of a cache, because all layers are written in the same order.
struct Order {
    const void *cache = nullptr, *mask = nullptr;
    int64_t n_written = 0, n_made = 0;  // distinguish a cache from a freed one with the same address and number of writes
    std::vector<int32_t> cells;

    bool is_of(const Order &o) const {
        return cache == o.cache && mask == o.mask && n_written == o.n_written && n_made == o.n_made;
    }

    void find(const Numbers &numbers, const ggml_tensor *op) {
        const int n = op->src[1]->ne[1], n_tokens = op->src[0]->ne[1];
        std::vector<uint16_t> hidden(n, 0xffff);
        for (int t = 0; t < n_tokens; t++) {
            const uint16_t *row = (const uint16_t *)((const char *)op->src[3]->data + t * op->src[3]->nb[1]);
            for (int c = 0; c < n; c++) hidden[c] &= row[c];  // -inf (0xfc00, masked) only if the cell is masked for every row
        }
        cells.clear();
        for (int c = 0; c < n; c++)
            if (hidden[c] != 0xfc00) cells.push_back(c);
        sort(numbers.of_cell.get());
    }

    void sort(const int64_t *number) {  // by merging sorted runs, of which thousands of cells have only a few
        const auto is_before = [=](int a, int b) { return number[a] < number[b]; };
        std::vector<int> ends;
        for (size_t i = 1; i <= cells.size(); i++)
            if (i == cells.size() || is_before(cells[i], cells[i - 1])) ends.push_back(i);
        for (; ends.size() > 1; ends.resize((ends.size() + 1) / 2))
            for (size_t i = 0; i < ends.size(); i += 2) {
                const int low = i ? ends[i / 2 - 1] : 0, high = ends[std::min(i + 1, ends.size() - 1)];
                std::inplace_merge(cells.begin() + low, cells.begin() + ends[i], cells.begin() + high, is_before);
                ends[i / 2] = high;
            }
    }
};
thread_local Order g_order;

}  // namespace

ggml::cpu::tensor_traits *cell_writes_for(const ggml_tensor *op) {
    return op->op == GGML_OP_SET_ROWS && op->view_src && is_keys(op->view_src) ? &g_writes : nullptr;
}

const std::vector<int32_t> *cell_order(const ggml_tensor *op) {
    const ggml_tensor *keys = op->src[1]->view_src, *mask = op->src[3];
    if (!keys || !mask || op->src[0]->ne[3] != 1 || op->src[1]->data != keys->data || !is_keys(keys)) return nullptr;
    const Numbers &numbers = numbers_of(keys);
    Order &order = g_order;
    const Order key{keys->buffer, mask->data, numbers.n_written, g_n_made, {}};
    if (!order.is_of(key)) order = key, order.find(numbers, op);
    return &order.cells;
}

// Records that a restore, not an operation of a graph, has written cells [first, first + n) of a cache tensor in this order.
extern "C" void edgeinfer_cells_written(const ggml_tensor *tensor, int64_t first, int64_t n) {
    if (!is_keys(tensor)) return;
    Numbers &numbers = numbers_of(tensor);
    for (int64_t cell = first; cell < first + n; cell++) numbers.of_cell.get()[cell] = ++numbers.n_written;
}

// Forgets the order in caches at addresses from `low` to `high`, whose memory will be freed.
extern "C" void edgeinfer_cells_freed(const char *low, const char *high) {
    std::lock_guard lock(g_lock);
    g_numbers.erase(g_numbers.lower_bound(low), g_numbers.lower_bound(high));
}
