// libedgeinfer-kernels-*.so.1: the in-tree kernels (attention.cpp, cell_order.cpp, matmul.cpp, elementwise.cpp) and their entry into ggml's CPU backend.
//
// The kernels are registered like repacked weights: ggml asks each "extra buffer type" whether it computes an operation of a graph,
// and calls it on ggml's own threads. This buffer type never stores weights.
#include <cstdio>
#include <vector>

#include "hook.h"

void (*g_barrier)(ggml_threadpool *);

namespace {

bool is_product(const ggml_tensor *op) { return op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID; }

// Returns whether ggml computes the same bits with every instruction set. It does so for copies, single operations on floats, and sums
// of doubles in order.
bool is_independent(const ggml_tensor *op) {
    switch (op->op) {
        case GGML_OP_NONE: case GGML_OP_DUP: case GGML_OP_ADD: case GGML_OP_ADD_ID: case GGML_OP_ADD1: case GGML_OP_ACC:
        case GGML_OP_SUB: case GGML_OP_MUL: case GGML_OP_DIV: case GGML_OP_SQR: case GGML_OP_SQRT: case GGML_OP_SUM:
        case GGML_OP_SUM_ROWS: case GGML_OP_CUMSUM: case GGML_OP_MEAN: case GGML_OP_ARGMAX: case GGML_OP_REPEAT:
        case GGML_OP_CONCAT: case GGML_OP_RMS_NORM: case GGML_OP_GROUP_NORM: case GGML_OP_L2_NORM: case GGML_OP_SCALE:
        case GGML_OP_SET: case GGML_OP_CPY: case GGML_OP_CONT: case GGML_OP_RESHAPE: case GGML_OP_VIEW: case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE: case GGML_OP_GET_ROWS: case GGML_OP_SET_ROWS: case GGML_OP_DIAG: case GGML_OP_DIAG_MASK_INF:
        case GGML_OP_CLAMP: case GGML_OP_IM2COL: case GGML_OP_PAD: case GGML_OP_ARANGE: case GGML_OP_ARGSORT:
        case GGML_OP_TOP_K: case GGML_OP_LEAKY_RELU: case GGML_OP_TRI: case GGML_OP_FILL: case GGML_OP_WIN_PART:
        case GGML_OP_WIN_UNPART:
            return true;
        case GGML_OP_ROPE: return op->op_params[2] != GGML_ROPE_TYPE_NORMAL;  // at a row's end, additions are fused differently
        case GGML_OP_RWKV_WKV6: return op->ne[0] / op->src[1]->ne[1] % 16 == 0;
        case GGML_OP_UNARY:
            switch (ggml_get_unary_op(op)) {
                case GGML_UNARY_OP_ABS: case GGML_UNARY_OP_SGN: case GGML_UNARY_OP_NEG: case GGML_UNARY_OP_STEP:
                case GGML_UNARY_OP_RELU: case GGML_UNARY_OP_HARDSWISH: case GGML_UNARY_OP_HARDSIGMOID: case GGML_UNARY_OP_FLOOR:
                case GGML_UNARY_OP_CEIL: case GGML_UNARY_OP_ROUND: case GGML_UNARY_OP_TRUNC:
                    return true;
                default: return false;
            }
        default: return false;
    }
}

// The first computed operation whose bits depend on the processor, and the type of that operation's first operand. The variable is
// per thread, because each engine has a separate decode thread, which takes part in all operations of that engine.
thread_local char t_dependent[64];

void note_dependent(const ggml_tensor *op) {
    if (!t_dependent[0]) snprintf(t_dependent, sizeof t_dependent, "%s %s", ggml_op_desc(op), ggml_type_name(op->src[0] ? op->src[0]->type : op->type));
}

class Hook : public ggml::cpu::extra_buffer_type {
    bool supports_op(ggml_backend_dev_t, const ggml_tensor *) override { return false; }
    ggml::cpu::tensor_traits *get_tensor_traits(const ggml_tensor *op) override {
        for (auto traits_for : {attention_for, cell_writes_for})
            if (ggml::cpu::tensor_traits *traits = traits_for(op)) return traits;
        if (is_product(op) && op->src[0]->type == GGML_TYPE_BF16 && matmul_takes(op->src[0])) note_dependent(op);  // vdpbf16ps rounds differently
        return matmul_for(op);
    }
};
// Second buffer type, which ggml asks about operations that the first one declines.
class SecondHook : public ggml::cpu::extra_buffer_type {
    bool supports_op(ggml_backend_dev_t, const ggml_tensor *) override { return false; }
    ggml::cpu::tensor_traits *get_tensor_traits(const ggml_tensor *op) override {
        ggml::cpu::tensor_traits *traits = elementwise_for(op);
        if (!traits && !is_independent(op)) note_dependent(op);
        return traits;
    }
};
Hook g_hook;
SecondHook g_second_hook;
ggml_backend_buffer_type g_entries[2];

}  // namespace

// Returns t_dependent of this thread; "" if every computed operation has the same bits with AVX2 and AVX-512.
extern "C" const char *edgeinfer_dependent_operation() { return t_dependent; }

// `types` is ggml_backend_cpu_get_extra_buffer_types, `barrier` ggml_barrier. A second call does nothing.
extern "C" void edgeinfer_kernels(std::vector<ggml_backend_buffer_type *> &(*types)(), void (*barrier)(ggml_threadpool *)) {
    if (g_barrier) return;
    g_barrier = barrier;
    g_entries[0].context = static_cast<ggml::cpu::extra_buffer_type *>(&g_hook);
    g_entries[1].context = static_cast<ggml::cpu::extra_buffer_type *>(&g_second_hook);
    for (ggml_backend_buffer_type &entry : g_entries) types().push_back(&entry);
}
