// stress_streaming FILE SLOT_BYTES STREAMED_BYTES N_EXPERTS GRAPHS SEED: threads compare streamed weights with the file that they are
// read from. Graphs are chosen at random: some begin or end in the middle, and some use a weight twice. Between them, the memory that
// is said to be available changes. Without experts, the model is dense.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>

#include "hook.h"

extern "C" {
int edgeinfer_stream_start(int n, const char *const *paths, const int64_t (*mapped)[3], int64_t slot_bytes, int64_t streamed_bytes);
int edgeinfer_stream_end();
void edgeinfer_stream_follow(int64_t available_bytes);
void edgeinfer_stream_statistics(double *to);
void edgeinfer_stream_stop();
}

namespace {
constexpr int kThreads = 3, kLayers = 4;
constexpr int64_t kFileBytes = 48 << 20;

struct Op { ggml_tensor product{}, weight{}, x{}; };

std::vector<uint8_t> g_content(kFileBytes);
std::atomic<int64_t> n_wrong;

void compare(const uint8_t *weight, int64_t offset, int64_t bytes) { n_wrong += memcmp(weight, &g_content[offset], bytes) != 0; }
}  // namespace

int main(int, char **arguments) {
    const char *path = arguments[1];
    const int n_experts = atoi(arguments[4]), n_graphs = atoi(arguments[5]);
    std::mt19937 random(atoi(arguments[6]));
    for (uint8_t &byte : g_content) byte = random();
    const int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (write(file, g_content.data(), kFileBytes) != kFileBytes || fsync(file)) return 1;
    uint8_t *base = (uint8_t *)mmap(nullptr, kFileBytes, PROT_READ, MAP_SHARED, file, 0);

    std::vector<std::unique_ptr<Op>> ops;
    std::vector<ggml_tensor> ids(kLayers);  // the layers' chosen experts
    int64_t end = 4128;
    auto add = [&](int64_t bytes, int n, ggml_tensor *chosen) {
        Op &op = *ops.emplace_back(std::make_unique<Op>());
        op.product.op = chosen ? GGML_OP_MUL_MAT_ID : GGML_OP_MUL_MAT;
        op.product.src[0] = &op.weight, op.product.src[1] = &op.x, op.product.src[2] = chosen;
        op.x.ne[1] = 1;
        op.weight = {.type = GGML_TYPE_I8, .ne = {bytes, 1, n, 1}, .nb = {1, (size_t)bytes, (size_t)bytes, size_t(n * bytes)}};
        op.weight.data = base + end;
        end += n * bytes;
    };
    for (int layer = 0; layer < kLayers; layer++) {
        for (int i = 0; i < 3; i++) add((2 << 20) + 32 * layer + (i << 16), 1, nullptr);
        for (int i = 0; i < 3 && n_experts; i++) add(100000 + 32 * layer + (i == 2 ? 20000 : 0), n_experts, &ids[layer]);
    }
    const int64_t mapped[1][3] = {{(int64_t)base, (int64_t)(base + kFileBytes), 0}};
    if (edgeinfer_stream_start(1, &path, mapped, atoll(arguments[2]), atoll(arguments[3]))) return 1;

    for (int g = 0; g < n_graphs; g++) {
        std::vector<Op *> graph;
        for (size_t i = random() % 6 ? 0 : random() % ops.size(); i < ops.size(); i++) graph.push_back(ops[i].get());
        if (random() % 4 == 0) graph.push_back(ops[0].get());
        for (Op *op : graph) stream_note(&op->product, true);
        if (random() % 6 == 0) graph.resize(random() % graph.size());  // aborted
        const int uses = random() % 3;  // one in four experts, half of them, or all
        std::vector<std::vector<int32_t>> firsts(graph.size(), std::vector<int32_t>(n_experts + 1));
        for (size_t i = 0; i < graph.size(); i++)
            for (int e = 0; e < n_experts; e++) firsts[i][e + 1] = firsts[i][e] + (uses == 2 || random() % (4 - 2 * uses) == 0 ? 2 : 0);
        for (size_t i = 1; i < graph.size(); i++)
            if (graph[i]->product.src[2] == graph[i - 1]->product.src[2]) firsts[i] = firsts[i - 1];
        std::vector<std::atomic<int>> next(graph.size());
        std::barrier barrier(kThreads);
        auto compute = [&](int thread) {
            for (size_t i = 0; i < graph.size(); i++) {
                const ggml_tensor *op = &graph[i]->product, *w = &graph[i]->weight;
                const int64_t offset = (uint8_t *)w->data - base;
                if (thread == 0) stream_begin(op, firsts[i].data(), kThreads);
                barrier.arrive_and_wait();
                if (!op->src[2]) compare(stream_slice(op, thread, 0), offset, w->nb[3]);
                int expert = -1;
                const uint8_t *slice = nullptr;
                for (int unit; op->src[2] && (unit = next[i]++) < firsts[i].back();) {
                    const int before = expert;
                    while (expert < 0 || firsts[i][expert + 1] <= unit) expert++;
                    if (expert > before) slice = stream_slice(op, thread, expert);
                    compare(slice, offset + expert * w->nb[2], w->nb[2]);
                }
                if (op->src[2]) stream_slice(op, thread, n_experts);
                barrier.arrive_and_wait();
            }
        };
        std::vector<std::thread> threads;
        for (int t = 0; t < kThreads; t++) threads.emplace_back(compute, t);
        for (std::thread &t : threads) t.join();
        if (edgeinfer_stream_end()) return 1;
        double statistics[6];
        edgeinfer_stream_statistics(statistics);
        if (random() % 4 == 0) edgeinfer_stream_follow((int64_t)statistics[3] + random() % (200 << 20));
    }
    edgeinfer_stream_stop();
    printf("%ld wrong slices\n", (long)n_wrong);
    return n_wrong != 0;
}
