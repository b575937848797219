// The parts of ggml's private headers that an extra buffer type needs (ggml-cpu-impl.h, traits.h, ggml-backend-impl.h).
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ggml-backend.h"
#include "ggml.h"

#ifndef INLINE  // the build with sanitizers defines it as empty, to compile in seconds
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
ggml::cpu::tensor_traits *attention_for(const ggml_tensor *op);  // these four functions return null for operations of other kinds
ggml::cpu::tensor_traits *matmul_for(const ggml_tensor *op);
ggml::cpu::tensor_traits *cell_writes_for(const ggml_tensor *op);
ggml::cpu::tensor_traits *elementwise_for(const ggml_tensor *op);
// Returns the cells that any row of an attention sees, in the order in which they were written; null without a KV cache.
const std::vector<int32_t> *cell_order(const ggml_tensor *op);
bool matmul_takes(const ggml_tensor *weight);

// What LoRA adapters add to one product of weights and activations x: scale * B (A x), for rows with an adapter (adapters.cpp).
// Each thread has a separate object.
struct AdapterPlan;
class Additions {
    const ggml_tensor *op;
    const AdapterPlan *plan;  // null without adapters
    const float *projected = nullptr;

public:
    explicit Additions(const ggml_tensor *op) : op(op), plan((const AdapterPlan *)op->extra) {}
    size_t size() const;
    void project(float *work, int ith, int nth);  // computes this thread's share of A x; a barrier follows
    void prefetch(int first, int n) const;        // prefetches B for these weight rows, and a part of the next product's A
    void add(int first, int n) const;             // `first` is a multiple of kLanes
};
// Called with each product before a graph is computed. The plan is kept in op->extra, which ggml's CPU backend does not use.
void plan_adapters(const ggml_tensor *op, bool is_accepted);

// Weights of a model that is larger than memory (streaming.cpp); null if all weights fit.
struct Stream;
extern Stream *g_stream;
void stream_note(const ggml_tensor *op, bool is_accepted);  // called for each product, in the order of the next graph
// Called by one thread before a product; firsts[e]: number of columns of the experts before e.
void stream_begin(const ggml_tensor *op, const int32_t *firsts, int n_threads);
// Returns the address of a weight (expert 0) or of an expert, after waiting for it. Each thread requests experts in order, and at the
// end the index after the last expert, for which null is returned.
const uint8_t *stream_slice(const ggml_tensor *op, int thread, int expert);
