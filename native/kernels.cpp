// libedgeinfer-kernels-*.so.1: the in-tree kernels (attention.cpp, cell_order.cpp, matmul.cpp) and their entry into ggml's CPU backend.
//
// They enter as repacked weights do: ggml asks each "extra buffer type" for each operation of a graph, and computes it in
// its own threads. This one is never a place for weights.
#include <vector>

#include "hook.h"

void (*g_barrier)(ggml_threadpool *);

namespace {

class Hook : public ggml::cpu::extra_buffer_type {
    bool supports_op(ggml_backend_dev_t, const ggml_tensor *) override { return false; }
    ggml::cpu::tensor_traits *get_tensor_traits(const ggml_tensor *op) override {
        for (auto traits_for : {attention_for, cell_writes_for})
            if (ggml::cpu::tensor_traits *traits = traits_for(op)) return traits;
        return matmul_for(op);
    }
};
Hook g_hook;
ggml_backend_buffer_type g_entry;

}  // namespace

// `types` is ggml_backend_cpu_get_extra_buffer_types, `barrier` ggml_barrier. A second call does nothing.
extern "C" void edgeinfer_kernels(std::vector<ggml_backend_buffer_type *> &(*types)(), void (*barrier)(ggml_threadpool *)) {
    if (g_entry.context) return;
    g_barrier = barrier;
    g_entry.context = static_cast<ggml::cpu::extra_buffer_type *>(&g_hook);
    types().push_back(&g_entry);
}
