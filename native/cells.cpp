// libedgeinfer-cells.so.1: copies a sequence's state from KV cells and to them. Pages of a file are mapped instead of copied.
//
// llama_state_seq_get_data and _set_data copy each tensor's cells through two functions of the tensor's
// buffer. During such a call edgeinfer replaces these functions by `edgeinfer_cells_get` and `_set`. `_get` records
// which bytes of the state belong to which cells. `_set` copies cells from their pieces instead of from the
// state. If a piece is in a mapped file, at the same offset in a page as the cells, the cells get the file's pages.
#include <ggml.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {
struct Copied {  // bytes [at, at + size) of the state are cells of the tensor whose data begin at `tensor`
    uint64_t at, size, tensor;
};

struct Piece {  // bytes [at, at + size) of the state lie at `source`
    uint64_t at, size;
    const char *source;
};

struct Transfer {  // fields with "get" or "set" are for edgeinfer_cells_get or edgeinfer_cells_set
    uint64_t state;         // address of the state's first byte
    Copied *copied;         // get: results, of which `capacity` fit; n_copied counts all
    uint64_t n_copied, capacity;
    const Piece *pieces;    // set: sorted by `at`
    uint64_t n_pieces;
    uint64_t page;          // bytes of a page
    uint64_t mapping;       // address where the pieces' file is mapped from its first byte on
    int64_t file;           // descriptor of that file; -1: everything is copied
    uint64_t n_bytes, n_mapped;  // set: results: bytes that pieces had; ranges of pages that were mapped
    void (*written)(const ggml_tensor *, int64_t first, int64_t n);  // set: edgeinfer_cells_written, or null
};

thread_local Transfer *transfer = nullptr;

// Maps the file's pages in place of the cells' whole pages. The mapping is private: later writes do not reach the file.
bool map_pages(char *cells, const char *source, uint64_t size) {
    const uint64_t page = transfer->page;
    if (transfer->file < 0 || static_cast<uint64_t>(cells - source) % page) return false;
    const uint64_t first = -reinterpret_cast<uint64_t>(cells) % page;
    if (size < first + page) return false;
    const uint64_t length = (size - first) / page * page;
    const off_t offset = static_cast<off_t>(reinterpret_cast<uint64_t>(source) + first - transfer->mapping);
    const int access = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
    if (mmap(cells + first, length, access, flags, static_cast<int>(transfer->file), offset) == MAP_FAILED) {
        mmap(cells + first, length, access, flags | MAP_ANONYMOUS, -1, 0);  // a failed mmap may have unmapped these pages
        return false;
    }
    std::memcpy(cells, source, first);
    std::memcpy(cells + first + length, source + first + length, size - first - length);
    ++transfer->n_mapped;
    return true;
}
}  // namespace

// Sets the transfer that edgeinfer_cells_get and _set carry out on this thread from now on.
extern "C" void edgeinfer_cells(Transfer *now) { transfer = now; }

extern "C" void edgeinfer_cells_get(void *, const ggml_tensor *tensor, void *data, size_t offset, size_t size) {
    const char *tensor_data = static_cast<const char *>(ggml_get_data(tensor));
    std::memcpy(data, tensor_data + offset, size);
    const uint64_t number = transfer->n_copied++;
    if (number >= transfer->capacity) return;
    const uint64_t at = reinterpret_cast<uint64_t>(data) - transfer->state;
    transfer->copied[number] = {at, size, reinterpret_cast<uint64_t>(tensor_data)};
}

extern "C" void edgeinfer_cells_set(void *, ggml_tensor *tensor, const void *data, size_t offset, size_t size) {
    char *cells = static_cast<char *>(ggml_get_data(tensor)) + offset;
    if (transfer->written) transfer->written(tensor, offset / tensor->nb[1], size / tensor->nb[1]);
    const uint64_t at = reinterpret_cast<uint64_t>(data) - transfer->state;
    const Piece *first = transfer->pieces, *behind = std::upper_bound(
        first, first + transfer->n_pieces, at, [](uint64_t value, const Piece &piece) { return value < piece.at; });
    const char *source = static_cast<const char *>(data);
    if (behind != first && at + size <= behind[-1].at + behind[-1].size) {
        source = behind[-1].source + (at - behind[-1].at);
        transfer->n_bytes += size;
        if (map_pages(cells, source, size)) return;
    }
    std::memcpy(cells, source, size);
}
