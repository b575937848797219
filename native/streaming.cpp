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
    uint8_t *address(int64_t at) const { return low + (at - offset); }
};
struct Weight;
struct Slice {  // an expert, or a whole weight without experts
    Weight *weight;
    const uint8_t *at = nullptr;  // address in a slot or in the mapping, set when it is requested
    int n_reads = 0;              // number of unfinished reads
    int n_uses = 1;               // number of uses by the product that needed it last
    int64_t group = -1;           // Stream::group that needed it last
    double key = -INFINITY;       // log2 of the sum of uses; each use counts half after kHalf tokens, which keeps the order of keys
};
struct Read {  // a read of whole pages
    Slice *slice;
    int64_t offset;
    size_t bytes;
    uint8_t *to;  // destination; null: the mapping
};
enum Kind { kPinned, kStreamed, kExperts };
struct Weight {
    File *file;
    int64_t offset;
    size_t bytes;  // bytes of a slice
    Kind kind;
    const ggml_tensor *ids = nullptr;
    std::vector<Slice> slices;
    int64_t start(const Slice &s) const { return offset + (&s - slices.data()) * bytes; }
    size_t slot_bytes() const { return round_up(bytes) + kPage; }
};

std::atomic<bool> g_is_damaged;
struct sigaction g_before;

}  // namespace

struct Stream {
    std::mutex mutex;
    std::condition_variable work, done;  // work: a read was requested; done: a slice was read, or a thread has passed an expert
    std::vector<File> files;
    std::deque<Read> reads;
    std::vector<std::thread> readers;
    bool is_stopping = false;
    int failure = 0;
    double waited_s = 0;
    int64_t bytes_read = 0, moved = 0;

    std::unordered_map<const void *, Weight> weights;
    std::vector<Weight *> recorded, order;  // weights of the graph being planned, and of the graph being computed
    std::map<double, Weight *> movable;     // weights that can be streamed; for any n, the first n are spread evenly over the graph
    int64_t movable_bytes = 0, to_stream, faults = 0;
    bool has_lost = false;  // whether the last graph lost pinned pages

    size_t ring_bytes, most_room, room, used = 0;  // bytes of slots: for dense weights (0: a mixture); limit at the start; limit now; in use
    std::map<size_t, std::vector<uint8_t *>> free_slots;  // by size; pages are in memory only while a slot is in use
    std::vector<Slice *> cached;
    std::vector<std::pair<void *, size_t>> areas;

    Weight *present = nullptr;     // weight of the product being computed
    std::vector<int> reached;      // the expert that each thread is at
    std::vector<Slice *> needed;   // slices that this product needs, then those of the next ones, in order
    size_t n_requested = 0;        // number of needed slices that are requested
    int64_t group = 0;             // counts dense products, and layers with experts, whose products need the same experts
    const ggml_tensor *ids = nullptr;  // the chosen experts of the layer
    int64_t tokens = 0;

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

    int64_t bytes_of(Kind kind) const {
        int64_t sum = 0;
        for (auto &[data, w] : weights) sum += w.kind == kind ? w.bytes : 0;
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
        const auto file = std::find_if(files.begin(), files.end(), [&](const File &f) { return data >= f.low && data < f.high; });
        if (file == files.end()) return nullptr;
        const bool has_experts = op->op == GGML_OP_MUL_MAT_ID;
        Weight w{&*file, data - file->low + file->offset, has_experts ? from->nb[2] : ggml_nbytes(from)};
        w.kind = has_experts ? kExperts : kPinned;
        const bool is_movable = !has_experts && w.bytes >= kLeast && w.slot_bytes() <= ring_bytes;
        if (!is_accepted || ((has_experts || is_movable) && !reserve_slots(w.slot_bytes()))) {
            madvise(file->address(round_down(w.offset)), round_up(ggml_nbytes(from)), MADV_NORMAL);
            return nullptr;
        }
        w.slices.resize(has_experts ? from->ne[2] : 1);
        Weight *added = &weights.emplace(data, std::move(w)).first->second;
        for (Slice &s : added->slices) s.weight = added;
        if (is_movable) movable[std::fmod(movable.size() * kGolden, 1)] = added, movable_bytes += added->bytes;
        return added;
    }
    bool reserve_slots(size_t bytes) {
        if (free_slots.count(bytes)) return true;
        if (bytes > room) return false;
        void *p = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) return false;
        madvise(p, room, MADV_DONTFORK);  // MADV_HUGEPAGE is not used: compaction for a gigabyte took 10 s
        areas.push_back({p, room});
        for (size_t at = 0; at + bytes <= room; at += bytes) free_slots[bytes].push_back((uint8_t *)p + at);
        return true;
    }

    void begin_graph(std::unique_lock<std::mutex> &lock) {
        order.swap(recorded), recorded.clear(), ids = nullptr, group++;
        rusage now;
        getrusage(RUSAGE_SELF, &now);
        const int64_t lost = (now.ru_majflt - faults) * kPage;  // bytes read by page faults, because pinned pages were evicted
        const bool is_again = std::exchange(has_lost, faults && lost > bytes_of(kPinned) / kLostShare);
        if (has_lost && is_again) to_stream += lost;
        faults = now.ru_majflt;
        choose(lock);
        while (used > room && evict_one(0, false)) {}
    }
    // Turns pinned weights into streamed ones, or back, so that about `to_stream` bytes are streamed.
    void choose(std::unique_lock<std::mutex> &lock) {
        int64_t missing = to_stream;
        for (auto &[turn, w] : movable) {
            const Kind kind = missing > (int64_t)w->bytes / 2 ? kStreamed : kPinned;
            if (kind == kStreamed) missing -= w->bytes;
            if (kind == w->kind) continue;
            Slice &s = w->slices[0];
            done.wait(lock, [&] { return !s.n_reads; });
            if (kind == kStreamed) {
                moved += s.at != nullptr;
                const int64_t low = round_up(w->offset), high = round_down(w->offset + w->bytes);
                madvise(w->file->address(low), high - low, MADV_DONTNEED);
                posix_fadvise(w->file->fd, low, high - low, POSIX_FADV_DONTNEED);
            } else if (s.at) {
                evict(s, 0);
            }
            w->kind = kind, s.at = nullptr;
        }
    }

    // ---- slots

    // Evicts the least used slice that is not needed; a slot of `same` bytes keeps its pages, for reuse. Returns false if all slices
    // are needed. For the present product, slices of later products, and experts that all threads have passed, may be evicted too.
    bool evict_one(size_t same, bool is_for_present) {
        const int first = is_for_present ? *std::min_element(reached.begin(), reached.end()) : 0;
        Slice *victim = nullptr;
        for (Slice *s : cached) {
            const bool is_past = is_for_present && (s->weight != present || s - present->slices.data() < first);
            if (s->n_reads || (s->group == group && !is_past)) continue;
            if (!victim || std::pair(s->group == group, s->key) < std::pair(victim->group == group, victim->key)) victim = s;
        }
        if (victim) evict(*victim, same);
        return victim;
    }
    void evict(Slice &s, size_t same) {
        const size_t bytes = s.weight->slot_bytes();
        uint8_t *slot = (uint8_t *)round_down((intptr_t)s.at);
        if (bytes != same) madvise(slot, bytes, MADV_DONTNEED);
        free_slots[bytes].push_back(slot);
        used -= bytes, s.at = nullptr;
        cached.erase(std::find(cached.begin(), cached.end(), &s));
    }
    // Requests a slice unless it is in memory. Returns false while there is no slot for it.
    bool keep(Slice &s) {
        const size_t bytes = s.weight->slot_bytes();
        if (!s.at && s.weight->kind == kPinned) {
            request(s, nullptr);
        } else if (!s.at) {
            auto &slots = free_slots[bytes];
            while ((used && used + bytes > room) || slots.empty())  // a slice always fits if there is no other one
                if (!evict_one(bytes, s.weight == present)) return false;
            request(s, slots.back());
            slots.pop_back();
            used += bytes, cached.push_back(&s);
        }
        const double now = tokens / kHalf;
        if (s.group != group) s.key = std::log2(s.n_uses + std::exp2(s.key - now)) + now;
        s.group = group;
        return true;
    }
    void keep_needed() {
        while (n_requested < needed.size() && keep(*needed[n_requested])) n_requested++;
    }
    // Marks the dense weights from this one on as needed, to the end of the graph, then from its beginning, for the next step.
    void need_dense(const Weight *w) {
        group++;
        const size_t n = order.size(), at = std::find(order.begin(), order.end(), w) - order.begin();
        for (size_t i = at; i < at + n; i++)
            if (order[i % n]->kind != kExperts) needed.push_back(&order[i % n]->slices[0]);
    }
    // Marks the experts of this product as needed, and the same experts of the layer's next products, so that many reads are queued.
    void need_experts(Weight *w, const ggml_tensor *op, const int32_t *firsts) {
        if (!ids) tokens += op->src[2]->ne[1];
        group += ids != op->src[2], ids = op->src[2];
        auto need = [&](Weight *product) {
            for (size_t e = 0; e < product->slices.size(); e++)
                if ((product->slices[e].n_uses = firsts[e + 1] - firsts[e])) needed.push_back(&product->slices[e]);
        };
        need(w);
        if (12 * w->slot_bytes() * needed.size() > room) return;
        for (auto next = std::find(order.begin(), order.end(), w); ++next != order.end() && (*next)->ids == ids;) need(*next);
    }

    // ---- products

    void begin(const ggml_tensor *op, const int32_t *firsts, int n_threads) {
        std::unique_lock<std::mutex> lock(mutex);
        Weight *w = find(op);
        if (!w) return;
        if (!recorded.empty()) begin_graph(lock);
        present = w, reached.assign(n_threads, 0);
        needed.clear(), n_requested = 0;
        if (w->kind == kExperts) need_experts(w, op, firsts);
        else if (w->kind == kStreamed || !w->slices[0].at) need_dense(w);
        keep_needed();
    }
    const uint8_t *slice(const ggml_tensor *op, int thread, int e) {
        std::unique_lock<std::mutex> lock(mutex);
        Weight *w = find(op);
        if (!w) return (const uint8_t *)op->src[0]->data + e * op->src[0]->nb[2];
        reached[thread] = e;
        if (e == (int)w->slices.size()) return done.notify_all(), nullptr;
        const Slice &s = w->slices[e];
        const auto before = std::chrono::steady_clock::now();
        done.wait(lock, [&] { return keep_needed(), s.at && !s.n_reads; });
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
    // Returns the failure (errno or code) since the last call, 0 for none; after a failure, empties all slots.
    int end() {
        std::unique_lock<std::mutex> lock(mutex);
        int code = std::exchange(failure, 0);
        for (const File &f : files) {
            struct stat now;
            if (code > 0 || fstat(f.fd, &now)) continue;
            if (now.st_size < f.opened.st_size) code = kShort;
            else if (memcmp(&now.st_mtim, &f.opened.st_mtim, sizeof now.st_mtim)) code = kChanged;
        }
        if (g_is_damaged && !code) code = EIO;
        if (!code) return 0;
        done.wait(lock, [&] { return std::none_of(cached.begin(), cached.end(), [](Slice *s) { return s->n_reads; }); });
        while (!cached.empty()) evict(*cached.back(), 0);
        if (!g_is_damaged.exchange(false)) return code;
        for (const File &f : files) {  // later steps must not use the zeros of on_bus_error
            if (mmap(f.low, f.high - f.low, PROT_READ, MAP_SHARED | MAP_FIXED, f.fd, f.offset) == MAP_FAILED) g_is_damaged = true;
            madvise(f.low, f.high - f.low, MADV_RANDOM);
        }
        for (auto &[data, w] : weights)
            if (w.kind == kPinned && !w.slices[0].n_reads) w.slices[0].at = nullptr;  // request it again: bulk reads are faster than page faults
        return code;
    }
    ~Stream() {
        { std::lock_guard<std::mutex> lock(mutex); is_stopping = true; }
        work.notify_all();
        for (std::thread &t : readers) t.join();
        for (auto [memory, bytes] : areas) munmap(memory, bytes);
        for (File &f : files) close(f.fd);
    }
};

namespace {
// SIGBUS handler: a page that the file no longer has, or that the disk cannot read, becomes zeros, and the step ends with an error.
void on_bus_error(int number, siginfo_t *info, void *) {
    uint8_t *page = (uint8_t *)round_down((intptr_t)info->si_addr);
    for (const File &f : g_stream->files)
        if (page >= f.low && page < f.high) {
            g_is_damaged = true;
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
int edgeinfer_stream_start(int n, const char *const *paths, const int64_t (*mapped)[3], int64_t ring_bytes, int64_t expert_bytes,
                           int64_t streamed_bytes) {
    if (g_stream) return EBUSY;
    auto *stream = new Stream;
    stream->ring_bytes = ring_bytes, stream->to_stream = streamed_bytes;
    stream->room = stream->most_room = round_up(ring_bytes + expert_bytes);
    if (const int code = stream->open(n, paths, mapped)) return delete stream, code;
    g_is_damaged = false, g_stream = stream;
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
    const int64_t free = available_bytes - s.bytes_of(kPinned) - (int64_t)(s.room - std::min(s.room, s.used));
    const int64_t change = std::min<int64_t>(0, free - kLeastFree) + std::max<int64_t>(0, free - kAmpleFree);
    if (std::abs(change) < kLeastChange) return;
    if (s.ring_bytes) s.to_stream = std::clamp<int64_t>(std::min(s.to_stream, s.movable_bytes) - change, 0, s.movable_bytes);
    else s.room = std::clamp<int64_t>(s.room + change, 0, s.most_room);
}
// Returns bytes read, seconds waited, number of weights moved to slots; and bytes of pinned weights, streamed weights and cached
// experts
void edgeinfer_stream_statistics(double *to) {
    Stream &s = *g_stream;
    std::lock_guard<std::mutex> lock(s.mutex);
    const double pinned = s.bytes_of(kPinned), streamed = s.bytes_of(kStreamed), experts = s.ring_bytes ? 0 : s.used;
    const double all[] = {(double)s.bytes_read, s.waited_s, (double)s.moved, pinned, streamed, experts};
    memcpy(to, all, sizeof all);
}
void edgeinfer_stream_stop() {
    g_stream->end();
    sigaction(SIGBUS, &g_before, nullptr);
    delete std::exchange(g_stream, nullptr);
}
}
