// Weights of a model that is larger than memory: decides which weights stay in memory, and reads the others at each step.
//
// A weight of a product may be pinned: its pages of the mapped file are read once and stay in memory. Other weights are read into
// slots, which are separate memory: a dense weight before its turn in the graph, a mixture's expert when it is used. The order of
// weights in the graph is the order in which MulMat::work_size is called before the graph is computed; names do not show it.
// Weights that the kernels do not multiply are read through the mapping.
//
// Weights read in a cycle are evicted by Linux's page cache before they are read again, so as many as fit are pinned. Threads read
// with pread(2), because containers' filters and CRIU refuse io_uring. Reads bypass the page cache (O_DIRECT), because it holds
// the pinned weights.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hook.h"

Stream *g_stream;

namespace {

constexpr int kReaders = 8;
constexpr size_t kOnce = 2 << 20;     // bytes per read
constexpr size_t kLeast = 2 << 20;    // smallest weight (bytes) that is streamed
constexpr size_t kAhead = 128 << 10;  // bytes per readahead(2): it silently reads no more than the device's limit
constexpr int kPopulateRead = 22;     // MADV_POPULATE_READ, since Linux 5.14
constexpr double kHalf = 64;          // after this many tokens, a use of an expert counts half
constexpr double kGolden = 0.6180339887;  // the fractional parts of n multiples of this number are evenly spread, for any n
constexpr int kLostShare = 64;        // pinned weights count as lost if page faults of a graph read 1 / kLostShare of their bytes
// If less memory (bytes) than kLeastFree is free, fewer weights stay in memory; if more than kAmpleFree, more weights
constexpr int64_t kLeastFree = 48 << 20, kAmpleFree = 112 << 20, kLeastChange = 16 << 20;
constexpr int kShort = -1, kChanged = -2;  // failures without an errno: the file ends too early, or was written to
const int64_t kPage = sysconf(_SC_PAGESIZE);

int64_t round_down(int64_t n) { return n / kPage * kPage; }
int64_t round_up(int64_t n) { return round_down(n + kPage - 1); }

struct File {  // a mapped file: the addresses [low, high) are those of its bytes from `offset` on
    uint8_t *low, *high;
    int64_t offset;
    int fd;  // with O_DIRECT, unless the file system lacks it
    struct stat opened;
    bool holds(const uint8_t *p) const { return p >= low && p < high; }
    uint8_t *address(int64_t at) const { return low + (at - offset); }
};
struct Weight;
struct Slice {  // an expert, or a whole weight without experts
    Weight *weight;
    const uint8_t *at = nullptr;  // address in a slot or in the mapping, set when it is requested
    int n_reads = 0;              // number of unfinished reads
    int64_t turn = 0;             // number of its next use: list_needed() numbers all uses of slices in the order of the graph
    double key = -INFINITY;       // log2 of the sum of uses; each use counts half after kHalf tokens, which keeps the order of keys
};
struct Read {  // a read of whole pages
    Slice *slice;
    int64_t offset;
    size_t bytes;
    uint8_t *to;  // destination; null: the mapping
};
struct Weight {
    File *file;
    int64_t offset;
    size_t bytes;                      // bytes of a slice
    bool is_pinned;                    // otherwise, slices are read into slots
    const ggml_tensor *ids = nullptr;  // the experts that the graph chooses; null without experts
    std::vector<Slice> slices;
    int64_t start(const Slice &s) const { return offset + (&s - slices.data()) * bytes; }
    size_t slot_bytes() const { return round_up(bytes) + kPage; }
};

struct sigaction g_before;

}  // namespace

struct Stream {
    std::mutex mutex;
    std::condition_variable work, done;  // work: a read was requested; done: a slice was read, or a thread has passed all experts
    std::vector<File> files;
    std::deque<Read> reads;
    std::vector<std::thread> readers;
    bool is_stopping = false;
    int failure = 0;
    std::atomic<bool> is_damaged = false;  // whether on_bus_error has replaced pages of the mapping by zeros
    double waited_s = 0;
    int64_t bytes_read = 0, moved = 0;

    std::unordered_map<const void *, Weight> weights;
    std::vector<Weight *> recorded, order;  // weights of the graph being planned, and of the graph being computed
    bool is_mixture = false;                // all weights but experts are pinned
    std::map<double, Weight *> movable;     // weights that can be streamed; for any n, the first n are spread evenly over the graph
    int64_t movable_bytes = 0, to_stream, faults = 0;
    bool has_lost = false;  // whether the last graph lost pinned pages

    size_t most_room, room, used = 0;  // bytes of slots: limit at the start; limit now; in use
    std::vector<Slice *> cached;       // slices in slots

    Weight *present = nullptr;     // weight of the product being computed; null if it is not in the files
    std::deque<Slice *> needed;    // slices that this product and later ones need, in order, without those that are requested
    std::vector<int64_t> reached;  // turn of the slice that each thread is at
    int64_t last_turn = 0, tokens = 0;

    // ---- reading

    // Returns an errno or kShort, or 0. If pages of the mapping cannot be read, the product's thread gets SIGBUS (on_bus_error).
    static int fetch(const Read &r) {
        const File &file = *r.slice->weight->file;
        for (size_t at = 0; !r.to && at < r.bytes; at += kAhead) readahead(file.fd, r.offset + at, std::min(kAhead, r.bytes - at));
        if (!r.to) return madvise(file.address(r.offset), r.bytes, kPopulateRead), 0;
        const size_t needed = std::min<size_t>(r.bytes, file.opened.st_size - r.offset);
        for (size_t n = 0; n < needed;) {
            const bool is_direct = fcntl(file.fd, F_GETFL) & O_DIRECT;
            const ssize_t some = pread(file.fd, r.to + n, r.bytes - n, r.offset + n);
            if (some > 0) n += some;
            else if (!some) return kShort;
            else if (errno == EINTR) continue;
            else if (is_direct) fcntl(file.fd, F_SETFL, 0);  // refused by the file system, or after a short read
            else return errno;
        }
        if (!(fcntl(file.fd, F_GETFL) & O_DIRECT)) posix_fadvise(file.fd, r.offset, r.bytes, POSIX_FADV_DONTNEED);
        return 0;
    }
    void read() {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            work.wait(lock, [&] { return is_stopping || !reads.empty(); });
            if (is_stopping) return;
            const Read r = reads.front();
            reads.pop_front();
            lock.unlock();
            const int code = fetch(r);
            lock.lock();
            bytes_read += r.bytes;
            if (code) failure = code;
            if (!--r.slice->n_reads) done.notify_all();
        }
    }
    // Requests that a slice is read into `slot`; if `slot` is null, as pages of the mapping.
    void request(Slice &s, uint8_t *slot) {
        const int64_t start = s.weight->start(s), low = round_down(start), high = round_up(start + s.weight->bytes);
        s.at = (slot ? slot : s.weight->file->address(low)) + (start - low);
        for (int64_t at = low; at < high; at += kOnce, s.n_reads++)
            reads.push_back({&s, at, std::min<size_t>(kOnce, high - at), slot ? slot + (at - low) : nullptr});
        work.notify_all();
    }

    // ---- weights, in the order of the graph

    int64_t dense_bytes(bool is_pinned) const {
        int64_t sum = 0;
        for (auto &[data, w] : weights) sum += !w.ids && w.is_pinned == is_pinned ? w.bytes : 0;
        return sum;
    }
    Weight *find(const ggml_tensor *op) {
        const auto entry = weights.find(op->src[0]->data);
        return entry == weights.end() ? nullptr : &entry->second;
    }
    void note(const ggml_tensor *op, bool is_accepted) {
        std::unique_lock<std::mutex> lock(mutex);
        Weight *w = find(op);
        if (!w && !(w = add(op, is_accepted))) return;
        w->ids = op->src[2];
        recorded.push_back(w);
    }
    // Returns null if the weight is not in the files, or is read by page faults.
    Weight *add(const ggml_tensor *op, bool is_accepted) {
        const ggml_tensor *from = op->src[0];
        const uint8_t *data = (const uint8_t *)from->data;
        const auto file = std::find_if(files.begin(), files.end(), [&](const File &f) { return f.holds(data); });
        if (file == files.end()) return nullptr;
        const int64_t offset = data - file->low + file->offset;
        if (!is_accepted) {
            madvise(file->address(round_down(offset)), round_up(ggml_nbytes(from)), MADV_NORMAL);
            return nullptr;
        }
        const bool has_experts = op->op == GGML_OP_MUL_MAT_ID;
        const size_t bytes = has_experts ? from->nb[2] : ggml_nbytes(from);
        Weight *w = &weights.emplace(data, Weight{&*file, offset, bytes, !has_experts}).first->second;
        w->slices.resize(has_experts ? from->ne[2] : 1, Slice{w});
        is_mixture |= has_experts;
        if (!has_experts && bytes >= kLeast && w->slot_bytes() <= most_room)
            movable[std::fmod(movable.size() * kGolden, 1)] = w, movable_bytes += bytes;
        return w;
    }
    // Begins a graph: turns pinned weights into streamed ones, or back, so that about `to_stream` bytes are streamed, and evicts
    // slices that `room` no longer holds.
    void begin_graph() {
        order.swap(recorded), recorded.clear();
        rusage now;
        getrusage(RUSAGE_SELF, &now);
        const int64_t lost = (now.ru_majflt - faults) * kPage;  // bytes read by page faults, because pinned pages were evicted
        const bool is_again = std::exchange(has_lost, faults && lost > dense_bytes(true) / kLostShare);
        if (has_lost && is_again) to_stream += lost;
        faults = now.ru_majflt;
        int64_t missing = is_mixture ? 0 : to_stream;
        for (auto &[turn, w] : movable) {
            const bool is_pinned = missing <= (int64_t)w->bytes / 2;
            if (!is_pinned) missing -= w->bytes;
            Slice &s = w->slices[0];
            if (is_pinned == w->is_pinned || s.n_reads) continue;  // a weight that is being read is moved later
            moved += s.at && !is_pinned;
            evict(s);
            w->is_pinned = is_pinned;
        }
        while (Slice *victim = used > room ? find_victim(0) : nullptr) evict(*victim);
    }

    // ---- slots

    static uint8_t *make_slot(size_t bytes) {
        void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) return nullptr;
        madvise(p, bytes, MADV_DONTFORK);  // MADV_HUGEPAGE is not used: compaction for a gigabyte took 10 s
        return (uint8_t *)p;
    }
    // Returns the slice to evict for a slice that is needed at `turn`; null if every cached one is needed from now to `turn`, or is
    // being read. Slices that are not needed later either come first, then the least used ones.
    Slice *find_victim(int64_t turn) const {
        const int64_t now = *std::min_element(reached.begin(), reached.end());  // all threads have passed earlier turns
        Slice *victim = nullptr;
        for (Slice *s : cached) {
            if (s->n_reads || (s->turn >= now && s->turn <= turn)) continue;
            if (!victim || std::pair(s->turn > turn, s->key) < std::pair(victim->turn > turn, victim->key)) victim = s;
        }
        return victim;
    }
    // Removes a slice from memory. Returns its slot, for reuse, if the slot has `bytes` bytes; otherwise frees it and returns null.
    uint8_t *evict(Slice &s, size_t bytes = 0) {
        const Weight &w = *s.weight;
        uint8_t *slot = (uint8_t *)round_down((intptr_t)std::exchange(s.at, nullptr));
        const auto entry = std::find(cached.begin(), cached.end(), &s);
        if (entry == cached.end()) {  // in the mapping
            const int64_t low = round_up(w.start(s)), high = round_down(w.start(s) + w.bytes);
            madvise(w.file->address(low), high - low, MADV_DONTNEED);
            posix_fadvise(w.file->fd, low, high - low, POSIX_FADV_DONTNEED);
            return nullptr;
        }
        cached.erase(entry), used -= w.slot_bytes();
        if (w.slot_bytes() == bytes) return slot;
        munmap(slot, w.slot_bytes());
        return nullptr;
    }
    // Requests a slice unless it is in memory. Returns false while there is no slot for it.
    bool keep(Slice &s) {
        if (s.at) return true;
        uint8_t *slot = nullptr;
        if (!s.weight->is_pinned) {
            const size_t bytes = s.weight->slot_bytes();
            while (!slot && used && used + bytes > room) {  // a slice always fits if there is no other one
                Slice *victim = find_victim(s.turn);
                if (!victim) return false;
                slot = evict(*victim, bytes);
            }
            if (!slot) slot = make_slot(bytes);  // null if the process may not have more memory: then the mapping is used
            if (slot) cached.push_back(&s), used += bytes;
        }
        request(s, slot);
        return true;
    }
    void keep_needed() {
        while (!needed.empty() && keep(*needed.front())) needed.pop_front();
    }
    // Lists the slices that this product and later ones need. After a dense weight, these are all dense weights to the end of the
    // graph, then from its beginning, for the next step; for experts, the layer's other products, which need the same experts.
    void list_needed(const int32_t *firsts) {
        needed.clear();
        const double now = tokens / kHalf;
        const int64_t first_turn = last_turn + 1;
        const size_t n = order.size(), at = std::find(order.begin(), order.end(), present) - order.begin();
        for (size_t i = at; i < (present->ids ? n : at + n); i++) {
            Weight *w = order[i % n];
            for (size_t e = 0; e < w->slices.size() && w->ids == present->ids; e++) {
                const int n_uses = w->ids ? firsts[e + 1] - firsts[e] : 1;
                Slice &s = w->slices[e];
                if (!n_uses || s.turn >= first_turn) continue;
                if (w == present) s.key = std::log2(n_uses + std::exp2(s.key - now)) + now;
                s.turn = ++last_turn, needed.push_back(&s);
            }
        }
    }

    // ---- products

    void begin(const ggml_tensor *op, const int32_t *firsts, int n_threads) {
        std::unique_lock<std::mutex> lock(mutex);
        present = find(op), reached.assign(n_threads, last_turn + 1);
        if (!present) return;
        if (!recorded.empty()) begin_graph(), tokens += op->src[1]->ne[1];
        list_needed(firsts);
        keep_needed();
    }
    const uint8_t *slice(const ggml_tensor *op, int thread, int e) {
        std::unique_lock<std::mutex> lock(mutex);
        if (!present) return (const uint8_t *)op->src[0]->data + e * op->src[0]->nb[2];
        const bool is_end = e == (int)present->slices.size();
        reached[thread] = is_end ? last_turn + 1 : present->slices[e].turn;
        if (is_end) return done.notify_all(), nullptr;
        const Slice &s = present->slices[e];
        const auto before = std::chrono::steady_clock::now();
        done.wait(lock, [&] {  // until `needed` is past this slice: a slice in `needed` may be in a slot, but may still be evicted
            keep_needed();
            return (needed.empty() || s.turn < needed.front()->turn) && !s.n_reads;
        });
        waited_s += std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count();
        return s.at;
    }

    // ---- called outside of a graph's computation

    int open(int n, const char *const *paths, const int64_t (*mapped)[3]) {
        for (int i = 0; i < n; i++) {
            const auto [low, high, offset] = mapped[i];
            File &f = files.emplace_back(File{(uint8_t *)low, (uint8_t *)high, offset});
            f.fd = ::open(paths[i], O_RDONLY | O_CLOEXEC | O_DIRECT);
            if (f.fd < 0) f.fd = ::open(paths[i], O_RDONLY | O_CLOEXEC);
            if (f.fd < 0 || fstat(f.fd, &f.opened)) return errno;
            madvise(f.low, f.high - f.low, MADV_RANDOM);  // each row of the token table is about a page
        }
        sigset_t all, before;  // block all signals in the new threads
        sigfillset(&all), pthread_sigmask(SIG_BLOCK, &all, &before);
        int code = 0;
        try {
            for (int i = 0; i < kReaders; i++) readers.emplace_back([this] { read(); });
        } catch (const std::system_error &error) {  // a limit on threads: continue with fewer
            if (readers.empty()) code = error.code().value();
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return code;
    }
    // Returns the failure since the last call (errno or code), 0 for none. After a failure, no weight is in memory.
    int end() {
        std::unique_lock<std::mutex> lock(mutex);
        int code = failure;
        for (const File &f : files) {
            struct stat now;
            if (code > 0 || fstat(f.fd, &now)) continue;
            if (now.st_size < f.opened.st_size) code = kShort;
            else if (memcmp(&now.st_mtim, &f.opened.st_mtim, sizeof now.st_mtim)) code = kChanged;
        }
        if (is_damaged && !code) code = EIO;
        if (!code) return 0;
        done.wait(lock, [&] { return std::none_of(cached.begin(), cached.end(), [](Slice *s) { return s->n_reads; }); });
        failure = 0;
        while (!cached.empty()) evict(*cached.back());
        for (auto &[data, w] : weights)
            for (Slice &s : w.slices) s.at = nullptr;
        if (!is_damaged.exchange(false)) return code;
        for (const File &f : files) {  // later steps must not use the zeros
            if (mmap(f.low, f.high - f.low, PROT_READ, MAP_SHARED | MAP_FIXED, f.fd, f.offset) == MAP_FAILED) is_damaged = true;
            madvise(f.low, f.high - f.low, MADV_RANDOM);
        }
        return code;
    }
    ~Stream() {
        { std::lock_guard<std::mutex> lock(mutex); is_stopping = true; }
        work.notify_all();
        for (std::thread &t : readers) t.join();
        while (!cached.empty()) evict(*cached.back());
        for (File &f : files) madvise(f.low, f.high - f.low, MADV_NORMAL), close(f.fd);
    }
};

namespace {
// SIGBUS handler: a page that the file no longer has, or that the disk cannot read, becomes zeros, and the step ends with an error.
void on_bus_error(int number, siginfo_t *info, void *) {
    uint8_t *page = (uint8_t *)round_down((intptr_t)info->si_addr);
    for (const File &f : g_stream->files)
        if (f.holds(page)) {
            g_stream->is_damaged = true;
            if (mmap(page, kPage, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED) return;
        }
    sigaction(number, &g_before, nullptr);  // not our page: the signal comes again, and goes to the previous handler
}
}  // namespace

void stream_note(const ggml_tensor *op, bool is_accepted) { g_stream->note(op, is_accepted); }
void stream_begin(const ggml_tensor *op, const int32_t *firsts, int n_threads) { g_stream->begin(op, firsts, n_threads); }
const uint8_t *stream_slice(const ggml_tensor *op, int thread, int expert) { return g_stream->slice(op, thread, expert); }

extern "C" {
// Starts streaming from n files; `mapped` has the first three fields of File for each. Returns an errno, or 0. Called between two
// steps, like the following functions. One model at a time.
int edgeinfer_stream_start(int n, const char *const *paths, const int64_t (*mapped)[3], int64_t slot_bytes, int64_t streamed_bytes) {
    if (g_stream) return EBUSY;
    auto *stream = new Stream;
    stream->room = stream->most_room = slot_bytes, stream->to_stream = streamed_bytes;
    if (const int code = stream->open(n, paths, mapped)) return delete stream, code;
    g_stream = stream;
    struct sigaction action {};
    action.sa_sigaction = on_bus_error, action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGBUS, &action, &g_before);
    return 0;
}
int edgeinfer_stream_end() { return g_stream ? g_stream->end() : 0; }
// Adapts to the available memory (bytes), which includes that of pinned weights: fewer weights stay in memory if little is free, and
// more if much is. Weights may use memory that is planned for the KV cache until the cache uses it.
void edgeinfer_stream_follow(int64_t available_bytes) {
    Stream &s = *g_stream;
    std::lock_guard<std::mutex> lock(s.mutex);
    const int64_t free = available_bytes - s.dense_bytes(true) - (int64_t)(s.room - std::min(s.room, s.used));
    const int64_t change = std::min<int64_t>(0, free - kLeastFree) + std::max<int64_t>(0, free - kAmpleFree);
    if (std::abs(change) < kLeastChange) return;
    if (s.is_mixture) s.room = std::clamp<int64_t>(s.room + change, 0, s.most_room);
    else s.to_stream = std::clamp<int64_t>(std::min(s.to_stream, s.movable_bytes) - change, 0, s.movable_bytes);
}
// Returns bytes read, seconds waited, number of weights moved to slots; and bytes of pinned weights, streamed weights and cached
// experts
void edgeinfer_stream_statistics(double *to) {
    Stream &s = *g_stream;
    std::lock_guard<std::mutex> lock(s.mutex);
    const double pinned = s.dense_bytes(true), streamed = s.dense_bytes(false), experts = s.is_mixture ? s.used : 0;
    const double all[] = {(double)s.bytes_read, s.waited_s, (double)s.moved, pinned, streamed, experts};
    memcpy(to, all, sizeof all);
}
void edgeinfer_stream_stop() {
    g_stream->end();
    sigaction(SIGBUS, &g_before, nullptr);
    delete std::exchange(g_stream, nullptr);
}
}
