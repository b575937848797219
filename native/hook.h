// The parts of ggml's private headers that an extra buffer type needs (ggml-cpu-impl.h, traits.h, ggml-backend-impl.h).
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ggml-backend.h"
#include "ggml.h"

#ifndef INLINE  // the build with sanitizers compiles in seconds without
#define INLINE inline __attribute__((always_inline))
#endif

struct ggml_threadpool;
struct ggml_compute_params {
    int ith, nth;
    size_t wsize;
    void *wdata;
    ggml_threadpool *threadpool;
    bool use_ref;
};
namespace ggml::cpu {
class tensor_traits {
public:
    virtual ~tensor_traits() {}
    virtual bool work_size(int n_threads, const ggml_tensor *op, size_t &size) = 0;
    virtual bool compute_forward(ggml_compute_params *params, ggml_tensor *op) = 0;
};
class extra_buffer_type {
public:
    virtual ~extra_buffer_type() {}
    virtual bool supports_op(ggml_backend_dev_t device, const ggml_tensor *op) = 0;
    virtual tensor_traits *get_tensor_traits(const ggml_tensor *op) = 0;
};
}  // namespace ggml::cpu
struct ggml_backend_buffer_type {
    void *interface[6];
    ggml_backend_dev_t device;
    void *context;
};

extern void (*g_barrier)(ggml_threadpool *);          // ggml_barrier
ggml::cpu::tensor_traits *attention_for(const ggml_tensor *op);  // null for other operations
ggml::cpu::tensor_traits *matmul_for(const ggml_tensor *op);
ggml::cpu::tensor_traits *cell_writes_for(const ggml_tensor *op);
// The cells that any row of an attention sees, as they were written; null without a KV cache.
const std::vector<int32_t> *cell_order(const ggml_tensor *op);
bool matmul_takes(const ggml_tensor *weight);

// What the LoRA adapters of this step add to one product (adapters.cpp); empty without any. Of one thread.
struct LoraPair;
class Additions {
    struct Run {
        const LoraPair *pair;
        float scale;
        int first, n;   // columns of the product
        size_t at;      // in `projected`
        bool is_first;  // of those with this pair
    };
    const ggml_tensor *op;
    std::vector<Run> runs;
    size_t n_floats = 0;
    const float *projected = nullptr;

public:
    explicit Additions(const ggml_tensor *op);
    size_t size() const { return n_floats * sizeof(float); }
    void project(float *work, int ith, int nth);  // A x, this thread's share; a barrier follows
    void prefetch(int first, int n) const;        // B of these rows of the weights
    void add(int first, int n) const;             // kLanes divides `first`
};
void plan_adapters(const ggml_tensor *op, bool is_accepted);  // called with each product before a graph is computed
