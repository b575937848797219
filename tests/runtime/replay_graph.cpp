// replay_graph FILE: computes every operation that tests/made/graph_digests.py recorded on another processor, each with what it read there,
// by ggml's CPU backend with the kernels that it is linked with. Prints a line for each result that differs: name, operation, and where;
// then the number of operations that were compared.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "ggml-cpu.h"
#include "hook.h"

extern "C" void edgeinfer_kernels(std::vector<ggml_backend_buffer_type *> &(*types)(), void (*barrier)(ggml_threadpool *));
extern "C" void ggml_barrier(ggml_threadpool *);
std::vector<ggml_backend_buffer_type *> &ggml_backend_cpu_get_extra_buffer_types();

namespace {

// of no alignment of its own, as the file has it
struct Entry { uint64_t address, n_bytes; ggml_tensor tensor; };
std::unordered_map<uint64_t, ggml_tensor *> g_tensors;

ggml_tensor *here(ggml_tensor *there) { return there ? g_tensors.at((uint64_t)there) : nullptr; }

void compute(ggml_tensor *op) {
    const ggml_init_params params{1 << 16, nullptr, true};
    ggml_context *context = ggml_init(params);
    ggml_cgraph *graph = ggml_new_graph_custom(context, 8, false);
    ggml_graph_add_node(graph, op);
    ggml_cplan plan = ggml_graph_plan(graph, 1, nullptr);
    std::vector<uint8_t> work(plan.work_size);
    plan.work_data = work.data();
    if (ggml_graph_compute(graph, &plan) != GGML_STATUS_SUCCESS) exit(1);
    ggml_free(context);
}

}  // namespace

int main(int, char **arguments) {
    ggml_cpu_init();
    edgeinfer_kernels(ggml_backend_cpu_get_extra_buffer_types, ggml_barrier);
    FILE *file = fopen(arguments[1], "rb");
    long n_compared = 0;
    for (Entry entry; file && fread(&entry, sizeof entry, 1, file);) {
        ggml_tensor *tensor = g_tensors[entry.address] = new ggml_tensor(entry.tensor);
        tensor->buffer = nullptr, tensor->extra = nullptr;
        for (ggml_tensor *&source : tensor->src) source = here(source);
        tensor->view_src = here(tensor->view_src);
        tensor->data = tensor->view_src ? (char *)tensor->view_src->data + tensor->view_offs : aligned_alloc(64, (ggml_nbytes(tensor) + 127) / 64 * 64);
        std::vector<uint8_t> content(entry.n_bytes);
        if (entry.n_bytes && !fread(content.data(), entry.n_bytes, 1, file)) return 1;
        uint8_t *computed = (uint8_t *)tensor->data;
        if (tensor->op != GGML_OP_NONE) {
            compute(tensor);
            size_t i = 0, n_differing = 0;
            for (size_t at = 0; at < content.size(); at++)
                if (computed[at] != content[at] && !n_differing++) i = at;
            if (n_differing) printf("%s %s: %zu of %zu bytes differ, the first is byte %zu\n", tensor->name, ggml_op_desc(tensor), n_differing, content.size(), i);
            n_compared += entry.n_bytes > 0;
        }
        if (entry.n_bytes) memcpy(computed, content.data(), entry.n_bytes);
    }
    printf("%ld\n", n_compared);
}
