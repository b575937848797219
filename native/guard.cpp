// libedgeinfer-guard.so.1: calls llama.cpp for callers that cannot catch C++ exceptions.
//
// If a device is lost or out of memory, Vulkan's backend throws an exception, and CUDA's aborts. edgeinfer calls llama.cpp through
// ctypes, where both end the process. Here both become a return code. llama.cpp copies and frees the cells of a state in
// destructors: an exception there calls std::terminate, from which longjmp returns. llama.cpp's functions are passed as pointers,
// so that this library links only with the C++ library.
#include <cxxabi.h>

#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>

namespace {
using Word = uint64_t;
struct Params {  // stands for llama_batch and the parameter structs of models and contexts: as large or larger, and passed in memory, too
    Word words[32];
};
thread_local std::jmp_buf *escape = nullptr;  // return point of the guarded call in progress
thread_local char reason[512];
std::terminate_handler terminate_before = nullptr;

void note(const char *message) { std::snprintf(reason, sizeof reason, "%s", message); }

void note_exception() {  // stores the message; call it only inside a catch handler
    try {
        throw;
    } catch (const std::exception &error) {
        note(error.what());
    } catch (...) {
        note("an exception without a message");
    }
}

void on_abort(const char *message) {  // called by ggml_abort, which calls abort() if this function returns
    if (escape) throw std::runtime_error(message);
    std::fprintf(stderr, "%s\n", message);
}

void on_terminate() {
    if (escape) {
        if (std::current_exception()) {
            note_exception();
            abi::__cxa_end_catch();  // ends the catch clause that the C++ runtime began before it called std::terminate
        }
        std::longjmp(*escape, 1);
    }
    if (terminate_before) terminate_before();
}

template <class Call> bool guarded(const Call &call) {  // returns whether the call returned normally
    std::jmp_buf here, *const before = escape;
    volatile bool is_done = false;
    reason[0] = 0;
    escape = &here;
    if (!setjmp(here)) {
        try {
            call();
            is_done = true;
        } catch (...) {
            note_exception();
        }
    }
    escape = before;
    return is_done;
}
}  // namespace

extern "C" void edgeinfer_guard(void *(*set_abort_callback)(void (*)(const char *))) {
    set_abort_callback(on_abort);
    terminate_before = std::set_terminate(on_terminate);
}

// Returns the message thrown by this thread's last guarded call; "" if it returned normally.
extern "C" const char *edgeinfer_reason() { return reason; }

// Calls a function of up to six integers and pointers, or of one or two and a structure of `size` bytes; returns whether the
// function returned normally. `n_words`: number of arguments before the structure; 0 if there is no structure.
extern "C" bool edgeinfer_guarded_call(void *function, const Word *w, int n_words, const void *params,
                                       size_t size, Word *result) {
    Params copy{};
    if (n_words > 2 || size > sizeof copy) return false;
    if (n_words) std::memcpy(&copy, params, size);
    using Six = Word (*)(Word, Word, Word, Word, Word, Word);
    return guarded([&] {
        if (n_words == 0) *result = reinterpret_cast<Six>(function)(w[0], w[1], w[2], w[3], w[4], w[5]);
        if (n_words == 1) *result = reinterpret_cast<Word (*)(Word, Params)>(function)(w[0], copy);
        if (n_words == 2) *result = reinterpret_cast<Word (*)(Word, Word, Params)>(function)(w[0], w[1], copy);
    });
}
