// libedgeinfer-guard.so.1: llama_decode, and a sequence's state out and in, for callers that can't catch C++ exceptions.
//
// A backend whose device is lost, or has no memory left, throws (Vulkan's) or aborts (CUDA's). edgeinfer
// calls llama.cpp through ctypes, where either ends the process. Here both end in a code. The functions
// come as pointers, so that this needs no library but the C++ one; waiting for the device is inside,
// because it is there that most errors show.
#include <cstdint>
#include <cstdio>
#include <stdexcept>

namespace {
struct Batch {  // llama_batch
    int32_t n_tokens;
    int32_t *token;
    float *embd;
    int32_t *pos;
    int32_t *n_seq_id;
    int32_t **seq_id;
    int8_t *logits;
};
constexpr int32_t kThrown = -100;
thread_local bool is_guarded = false;

void on_abort(const char *message) {  // ggml_abort calls this, and abort() if it returns
    if (is_guarded) throw std::runtime_error(message);
    std::fprintf(stderr, "%s\n", message);
}
}  // namespace

extern "C" void edgeinfer_guard(void *(*set_abort_callback)(void (*)(const char *))) {
    set_abort_callback(on_abort);
}

extern "C" int32_t edgeinfer_decode(int32_t (*decode)(void *, Batch), void (*synchronize)(void *),
                                    void *context, Batch batch) {
    is_guarded = true;
    int32_t code = kThrown;
    try {
        code = decode(context, batch);
        synchronize(context);
    } catch (...) {
        code = kThrown;
    }
    is_guarded = false;
    return code;
}

// llama_state_seq_get_data_ext or llama_state_seq_set_data_ext; 0 where it has failed
extern "C" size_t edgeinfer_state(size_t (*move)(void *, uint8_t *, size_t, int32_t, uint32_t),
                                  void *context, uint8_t *data, size_t size, int32_t seq_id, uint32_t flags) {
    is_guarded = true;
    size_t moved = 0;
    try {
        moved = move(context, data, size, seq_id, flags);
    } catch (...) {
        moved = 0;
    }
    is_guarded = false;
    return moved;
}
