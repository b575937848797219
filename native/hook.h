// The parts of ggml's private headers that an extra buffer type needs (ggml-cpu-impl.h, traits.h, ggml-backend-impl.h).
#pragma once
#include <cstddef>

#include "ggml-backend.h"
#include "ggml.h"

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
