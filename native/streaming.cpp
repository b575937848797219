// Weights of a model that is larger than memory: decides which stay in memory, and where the others are read to.
//
// The weight of a product is pinned (its pages of the mapped file are read once), or streamed through a ring in the order of the
// graph, or it consists of a mixture's experts, which are read into slots. The order is that of the calls of MulMat::work_size
// before a graph is computed; names do not show it. Weights that the kernels do not multiply are read through the mapping.
//
// Linux's page cache keeps nothing of weights read in a cycle, so all that fit are pinned. Threads read with pread(2), because
// containers' filters and CRIU refuse io_uring. They bypass the page cache (O_DIRECT), which contains the pinned weights.
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
constexpr size_t kAhead = 128 << 10;  // bytes per readahead(2), which silently drops what exceeds limits of the device
constexpr int kPopulateRead = 22;     // MADV_POPULATE_READ, since Linux 5.14
constexpr double kHalf = 64;          // half-life of an expert's use, in tokens
constexpr int kLeastSlots = 4, kManyFaults = 64, kLostShare = 16;
constexpr int kShort = -1, kChanged = -2;  // failures without an errno: the file ends too early, or was written to
const int64_t kPage = sysconf(_SC_PAGESIZE);

int64_t round_down(int64_t n) { return n / kPage * kPage; }
int64_t round_up(int64_t n) { return round_down(n + kPage - 1); }

struct File {
    int direct = -1, buffered = -1;       // descriptors with O_DIRECT (-1 if the file system lacks it) and without
    std::atomic<bool> is_direct = false;  // set to false when a read with O_DIRECT is refused
    uint8_t *base;    // start of the mapping
    uint8_t *zeroed;  // by page: whether zeros replace it
    struct stat opened;
};
struct Load {
    const uint8_t *at = nullptr;
    int parts = 0;  // number of unfinished reads
};
struct Read {  // a read of whole pages
    File *file;
    int64_t offset;
    size_t bytes;
    uint8_t *to;  // destination; null: the page cache
    Load *load;
};
enum Kind { kFixed, kPinned, kStreamed, kExperts, kMapped };
struct Weight;
struct Slice : Load {  // an expert
    Weight *of;
    double key = -INFINITY;  // log2 of its uses, which count half after kHalf tokens; the order of keys does not change by time
    int64_t group = -1;      // group that used the expert last
    size_t place;  // index in Stream::cached
};
struct Weight : Load {
    File *file;
    int64_t offset;
    size_t bytes;  // bytes of one expert, if the weight has experts
    Kind kind;
    int losses = 0;
    size_t in_ring = 0;  // bytes in the ring, with those skipped before it
    const ggml_tensor *ids = nullptr;
    std::vector<Slice> slices;
    int64_t low() const { return round_down(offset); }
    size_t slot_bytes() const { return round_up(bytes) + kPage; }
};

std::atomic<bool> g_is_damaged;
struct sigaction g_before;

}  // namespace

struct Stream {
    std::mutex mutex;
    std::condition_variable work, done;
    std::deque<File> files;
    std::deque<Read> urgent, background;
    std::vector<std::thread> readers;
    bool is_stopping = false;
    int failure = 0;
    std::unordered_map<const void *, Weight> weights;
    std::vector<Weight *> recorded, order;  // weights of the graph that is planned, and of the one that is computed
    bool is_computing = true, is_dirty = true;
    int64_t faults = 0, to_stream;

    std::vector<Weight *> streamed;  // weight i of the endless sequence is streamed[i % n]; the ring holds [tail, head)
    uint8_t *ring = nullptr;
    size_t ring_bytes, in_ring = 0, write_at = 0;
    int64_t head = 0, tail = 0;

    size_t slot_room, in_slots = 0;
    std::vector<std::pair<void *, size_t>> areas;
    std::map<size_t, std::vector<uint8_t *>> free_slots;  // size → free slots; pages are in memory only while they hold a slice
    std::vector<Slice *> cached;
    Weight *present = nullptr;  // weight whose experts are being multiplied; those from `cursor` on are not requested yet
    std::vector<int> uses, reached;  // uses per expert, and the expert that each thread is at
    size_t cursor = 0;
    const ggml_tensor *ids = nullptr;  // chosen experts: the same for all weights of a layer, which form a group
    int64_t group = 0, tokens = 0;

    double waited_s = 0;
    int64_t bytes_read = 0, moved = 0;

    // ---- reading

    int fetch(const Read &r) {
        const size_t needed = std::min<size_t>(r.bytes, r.file->opened.st_size - r.offset);
        for (size_t n = 0; n < needed;) {
            const bool direct = r.file->is_direct;
            const ssize_t some = pread(direct ? r.file->direct : r.file->buffered, r.to + n, r.bytes - n, r.offset + n);
            if (some > 0) n += some;
            else if (!some) return kShort;
            else if (errno == EINVAL && direct) r.file->is_direct = false;  // tmpfs and some FUSE file systems lack O_DIRECT
            else if (errno != EINTR) return errno;
        }
        if (!r.file->is_direct) posix_fadvise(r.file->buffered, r.offset, r.bytes, POSIX_FADV_DONTNEED);
        return 0;
    }
    static int populate(const Read &r) {
        for (size_t at = 0; at < r.bytes; at += kAhead) readahead(r.file->buffered, r.offset + at, std::min(kAhead, r.bytes - at));
        const bool is_read = !madvise(r.file->base + r.offset, r.bytes, kPopulateRead) || (errno != EFAULT && errno != EHWPOISON);
        return is_read ? 0 : EIO;
    }
    void read() {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            work.wait(lock, [&] { return is_stopping || !urgent.empty() || !background.empty(); });
            if (is_stopping) return;
            auto &queue = urgent.empty() ? background : urgent;
            const Read r = queue.front();
            queue.pop_front();
            lock.unlock();
            const int code = r.to ? fetch(r) : populate(r);
            lock.lock();
            bytes_read += r.bytes;
            if (code) failure = code;
            if (!--r.load->parts) done.notify_all();
        }
    }
    void ask(std::deque<Read> &queue, const Weight &w, int64_t offset, uint8_t *to, Load &load) {
        const int64_t low = round_down(offset), high = round_up(offset + w.bytes);
        load.at = to ? to + (offset - low) : w.file->base + offset;
        for (int64_t at = low; at < high; at += kOnce, load.parts++)
            queue.push_back({w.file, at, std::min<size_t>(kOnce, high - at), to ? to + (at - low) : nullptr, &load});
        work.notify_all();
    }
    template <class F> void wait(std::unique_lock<std::mutex> &lock, F is_done) {
        const auto before = std::chrono::steady_clock::now();
        while (!is_done()) done.wait(lock);
        waited_s += std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count();
    }

    // ---- weights in the order of the graph

    Weight *find(const void *data) {
        const auto found = weights.find(data);
        return found == weights.end() ? nullptr : &found->second;
    }
    void note(const ggml_tensor *op, bool is_accepted) {
        std::unique_lock<std::mutex> lock(mutex);
        const ggml_tensor *from = op->src[0];
        Weight *w = find(from->data);
        if (!w) {
            const auto file = std::find_if(files.begin(), files.end(), [&](const File &f) {
                return from->data >= f.base && from->data < f.base + f.opened.st_size;
            });
            if (file == files.end()) return;  // the data belong to another model, or are an activation
            w = &add(op, &*file, is_accepted);
        }
        if (w->kind == kMapped) return;
        if (is_computing) recorded.clear(), is_computing = false;
        w->ids = w->kind == kExperts ? op->src[2] : nullptr;
        recorded.push_back(w);
    }
    Weight &add(const ggml_tensor *op, File *file, bool is_accepted) {
        const ggml_tensor *from = op->src[0];
        const bool has_experts = op->op == GGML_OP_MUL_MAT_ID;
        Weight &w = weights[from->data];
        w.file = file, w.offset = (const uint8_t *)from->data - file->base;
        w.bytes = has_experts ? from->nb[2] : ggml_nbytes(from);
        const bool is_whole = w.bytes < kLeast || w.slot_bytes() > ring_bytes || !strncmp(from->name, "output", 6) || !strncmp(from->name, "token_embd", 10);
        w.kind = has_experts ? kExperts : is_whole ? kFixed : kPinned;
        if (!is_accepted || (has_experts && !add_slots(w, from->ne[2]))) {
            w.kind = kMapped;
            madvise(file->base + w.low(), round_up(ggml_nbytes(from)), MADV_NORMAL);
        }
        return w;
    }
    bool add_slots(Weight &w, int n) {
        const size_t bytes = w.slot_bytes();
        if (bytes * kLeastSlots > slot_room) return false;
        if (!free_slots.count(bytes)) {
            uint8_t *memory = allocate(slot_room);
            if (!memory) return false;
            for (size_t at = 0; at + bytes <= slot_room; at += bytes) free_slots[bytes].push_back(memory + at);
        }
        w.slices.resize(n);
        for (Slice &s : w.slices) s.of = &w;
        return true;
    }
    uint8_t *allocate(size_t bytes) {
        void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) return nullptr;
        madvise(p, bytes, MADV_DONTFORK);  // MADV_HUGEPAGE is not used: compaction for a gigabyte took 10 s
        areas.push_back({p, bytes});
        return (uint8_t *)p;
    }

    void begin_graph(std::unique_lock<std::mutex> &lock) {
        is_computing = true, ids = nullptr;
        stream_what_is_lost();
        if (recorded != order) order = recorded, is_dirty = true;
        if (!is_dirty) return;
        is_dirty = false;
        empty_ring(lock), choose();
        for (Weight *w : order)
            if (w->kind <= kPinned && !w->at && !w->parts) ask(background, *w, w->offset, nullptr, *w);
        while (in_slots > slot_room && let_go_of_one(false, 0)) {}
        for (Weight *w : order)
            if (w->kind == kStreamed && std::find(streamed.begin(), streamed.end(), w) == streamed.end()) streamed.push_back(w);
        fill();
    }
    void empty_ring(std::unique_lock<std::mutex> &lock) {
        wait(lock, [&] { return std::none_of(streamed.begin(), streamed.end(), [](const Weight *w) { return w->parts; }); });
        head = tail = 0, in_ring = write_at = 0, streamed.clear();
    }
    // Spreads the streamed weights over the graph, so that reading never pauses.
    void choose() {
        int64_t missing = to_stream, total = 0;
        for (auto &[data, w] : weights) missing -= w.kind == kStreamed ? (int64_t)w.bytes : 0;
        const Kind from = missing > 0 ? kPinned : kStreamed;
        for (Weight *w : order) total += w->kind == from ? w->bytes : 0;
        const double share = std::min(1.0, std::abs((double)missing) / std::max<int64_t>(total, 1));
        double error = 0;
        for (Weight *w : order) {
            if (w->kind != from) continue;
            error += share * w->bytes;
            if (error <= w->bytes / 2.0) continue;
            error -= w->bytes;
            if (from == kPinned) stream(*w);
            else w->kind = kPinned, w->at = nullptr;
        }
    }
    void stream(Weight &w) {
        w.kind = kStreamed, moved += w.at != nullptr, w.at = nullptr;
        const int64_t low = round_up(w.offset), high = round_down(w.offset + w.bytes);
        madvise(w.file->base + low, high - low, MADV_DONTNEED);
        posix_fadvise(w.file->buffered, low, high - low, POSIX_FADV_DONTNEED);
    }
    // Reads back, once, pages that were evicted for other programs; a weight that loses pages again is streamed.
    void stream_what_is_lost() {
        rusage now;
        if (getrusage(RUSAGE_SELF, &now) || now.ru_majflt - faults < kManyFaults) return;
        faults = now.ru_majflt;
        std::vector<unsigned char> pages;
        for (Weight *w : order) {
            if (w->kind > kPinned || w->parts || !w->at) continue;
            const int64_t bytes = round_up(w->offset + w->bytes) - w->low();
            pages.assign(bytes / kPage, 1);
            mincore(w->file->base + w->low(), bytes, pages.data());
            const size_t lost = std::count_if(pages.begin(), pages.end(), [](auto page) { return !(page & 1); });
            if (lost * kLostShare < pages.size()) continue;
            is_dirty = true;
            if (w->kind == kPinned && w->losses++) to_stream += w->bytes, stream(*w);
            else w->at = nullptr;
        }
    }

    // ---- the ring

    void fill() {
        const int64_t n = streamed.size();
        for (; head - tail < n; head++) {
            Weight &w = *streamed[head % n];
            const size_t bytes = round_up(w.offset + w.bytes) - w.low();
            if (head == tail) write_at = in_ring = 0;  // from the start, or a weight larger than the rest of the ring would wait forever
            const size_t skipped = write_at + bytes > ring_bytes ? ring_bytes - write_at : 0;
            if (in_ring + skipped + bytes > ring_bytes) return;
            if (skipped) write_at = 0;
            w.in_ring = skipped + bytes, in_ring += w.in_ring;
            ask(urgent, w, w.offset, ring + write_at, w);
            write_at += bytes;
        }
    }
    // Frees the ring before the weight. If it is not the next one (another graph, or after an abort), skips to it.
    void go_to(const Weight *w, std::unique_lock<std::mutex> &lock) {
        for (; streamed[tail % streamed.size()] != w; tail++, head = std::max(head, tail)) {
            if (tail == head) continue;
            const Weight &old = *streamed[tail % streamed.size()];
            wait(lock, [&] { return !old.parts; });
            in_ring -= old.in_ring;
        }
        fill();
    }

    // ---- experts

    // Returns whether no thread uses the slice, now or later in this product
    bool is_past(const Slice &s) const {
        return s.of != present || &s - s.of->slices.data() < *std::min_element(reached.begin(), reached.end());
    }
    // Evicts the least used expert; its slot stays for one of `same` bytes. Returns false if all are needed.
    bool let_go_of_one(bool is_urgent, size_t same) {
        Slice *victim = nullptr;
        for (Slice *s : cached) {
            const bool is_needed = s->group == group;
            if (s->parts || (is_needed && !(is_urgent && is_past(*s)))) continue;
            if (!victim || std::pair(is_needed, s->key) < std::pair(victim->group == group, victim->key)) victim = s;
        }
        if (victim) let_go(*victim, same);
        return victim;
    }
    void let_go(Slice &s, size_t same) {
        const size_t bytes = s.of->slot_bytes();
        uint8_t *slot = (uint8_t *)round_down((intptr_t)s.at);
        if (bytes != same) madvise(slot, bytes, MADV_DONTNEED);
        free_slots[bytes].push_back(slot);
        in_slots -= bytes, s.at = nullptr;
        cached[s.place] = cached.back(), cached[s.place]->place = s.place;
        cached.pop_back();
    }
    // Starts to load an expert into a slot unless it is there; returns false while there is no room.
    bool keep(Slice &s, int n_uses, bool is_urgent) {
        const Weight &w = *s.of;
        const size_t bytes = w.slot_bytes();
        if (!s.at) {
            while (in_slots + bytes > slot_room)
                if (!let_go_of_one(is_urgent, bytes)) return false;
            uint8_t *slot = free_slots[bytes].back();
            free_slots[bytes].pop_back();
            in_slots += bytes, s.place = cached.size(), cached.push_back(&s);
            ask(urgent, w, w.offset + (&s - w.slices.data()) * w.bytes, slot, s);
        }
        const double now = tokens / kHalf;
        if (s.group != group) s.key = std::log2(n_uses + std::exp2(s.key - now)) + now;
        s.group = group;
        return true;
    }
    // Requests the current product's experts in order, as far as there is room; threads that finish an expert make room.
    void keep_wanted() {
        for (; cursor < uses.size(); cursor++)
            if (uses[cursor] && !keep(present->slices[cursor], uses[cursor], true)) return;
    }
    void begin_experts(Weight &w, const ggml_tensor *op, const int32_t *firsts, int n_threads) {
        const size_t n = w.slices.size();
        if (!ids) tokens += op->src[2]->ne[1];
        group += ids != op->src[2], ids = op->src[2];
        present = &w, cursor = 0, reached.assign(n_threads, 0), uses.resize(n);
        for (size_t e = 0; e < n; e++) uses[e] = firsts[e + 1] - firsts[e];
        keep_wanted();
        // the same experts of the layer's other weights, so that the disk always has many reads to do
        if (12 * w.slot_bytes() * (n - std::count(uses.begin(), uses.end(), 0)) > slot_room) return;
        for (auto later = std::find(order.begin(), order.end(), &w); later != order.end(); ++later)
            for (size_t e = 0; e < n && (*later)->ids == ids && (*later)->slices.size() == n; e++)
                if (uses[e]) keep((*later)->slices[e], uses[e], false);
    }

    // ---- products

    void begin(const ggml_tensor *op, const int32_t *firsts, int n_threads) {
        std::unique_lock<std::mutex> lock(mutex);
        Weight *w = find(op->src[0]->data);
        if (!w) return;
        if (!is_computing) begin_graph(lock);
        if (w->kind == kStreamed) go_to(w, lock);
        if (w->kind == kExperts) begin_experts(*w, op, firsts, n_threads);
    }
    const uint8_t *weight(const ggml_tensor *op) {
        std::unique_lock<std::mutex> lock(mutex);
        Weight *w = find(op->src[0]->data);
        if (w) wait(lock, [&] { return !w->parts; });
        return w && w->kind == kStreamed ? w->at : (const uint8_t *)op->src[0]->data;
    }
    const uint8_t *expert(const ggml_tensor *op, int thread, int e) {
        std::unique_lock<std::mutex> lock(mutex);
        Weight *w = find(op->src[0]->data);
        if (!w || w->kind != kExperts) return (const uint8_t *)op->src[0]->data + e * op->src[0]->nb[2];
        reached[thread] = e;
        if (e == (int)w->slices.size()) return done.notify_all(), nullptr;
        const Slice &s = w->slices[e];
        wait(lock, [&] { return keep_wanted(), s.at && !s.parts; });
        return s.at;
    }

    // ---- called outside of a graph's computation

    int open(int n, const char *const *paths, uint8_t *const *bases) {
        for (int i = 0; i < n; i++) {
            File &f = files.emplace_back();
            f.base = bases[i], f.buffered = ::open(paths[i], O_RDONLY | O_CLOEXEC);
            if (f.buffered < 0 || fstat(f.buffered, &f.opened)) return errno;
            f.direct = ::open(paths[i], O_RDONLY | O_CLOEXEC | O_DIRECT), f.is_direct = f.direct >= 0;
            if (!(f.zeroed = allocate(round_up(f.opened.st_size) / kPage))) return ENOMEM;
            madvise(f.base, f.opened.st_size, MADV_RANDOM);  // each row of the token table is about a page
        }
        if (ring_bytes && !(ring = allocate(ring_bytes))) return ENOMEM;
        sigset_t all, before;  // block all signals in the new threads
        sigfillset(&all), pthread_sigmask(SIG_BLOCK, &all, &before);
        int code = 0;
        try {
            for (int i = 0; i < kReaders; i++) readers.emplace_back([this] { read(); });
        } catch (const std::system_error &error) {  // a limit on threads: fewer threads can read as well
            if (readers.empty()) code = error.code().value();
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return code;
    }
    // Returns the failure since the last call, 0 for none. After a failure, all read weights are dropped.
    int end() {
        std::unique_lock<std::mutex> lock(mutex);
        int code = std::exchange(failure, 0);
        if (!code && g_is_damaged) code = EIO;
        for (const File &f : files) {
            struct stat now;
            if (fstat(f.buffered, &now)) code = errno;
            else if (now.st_size < f.opened.st_size) code = kShort;
            else if (memcmp(&now.st_mtim, &f.opened.st_mtim, sizeof now.st_mtim)) code = kChanged;
        }
        if (!code) return 0;
        empty_ring(lock), is_dirty = true;
        wait(lock, [&] { return std::none_of(cached.begin(), cached.end(), [](Slice *s) { return s->parts; }); });
        while (!cached.empty()) let_go(*cached.back(), 0);
        return code;
    }
    ~Stream() {
        { std::lock_guard<std::mutex> lock(mutex); is_stopping = true; }
        work.notify_all();
        for (std::thread &t : readers) t.join();
        for (auto [memory, bytes] : areas) munmap(memory, bytes);
        for (File &f : files) close(f.direct), close(f.buffered);
    }
};

namespace {
// Maps the file again where zeros replaced its pages: later steps, which do not end in an error, must not compute with zeros.
void restore_pages() {
    for (const File &f : g_stream->files)
        for (int64_t at = 0; at < f.opened.st_size; at += kPage)
            if (f.zeroed[at / kPage]) mmap(f.base + at, kPage, PROT_READ, MAP_SHARED | MAP_FIXED, f.buffered, at);
}
// SIGBUS handler: a page that the file lost, or that the disk cannot read, becomes zeros, and the step ends in an error.
void on_bus_error(int number, siginfo_t *info, void *) {
    uint8_t *page = (uint8_t *)round_down((intptr_t)info->si_addr);
    if (g_stream)
        for (const File &f : g_stream->files)
            if (page >= f.base && page < f.base + f.opened.st_size) {
                g_is_damaged = true, f.zeroed[(page - f.base) / kPage] = true;
                if (mmap(page, kPage, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED) return;
            }
    sigaction(number, &g_before, nullptr);  // not our page: the signal comes again, and goes to the previous handler
}
}  // namespace

void stream_note(const ggml_tensor *op, bool is_accepted) { g_stream->note(op, is_accepted); }
void stream_begin(const ggml_tensor *op, const int32_t *firsts, int n_threads) { g_stream->begin(op, firsts, n_threads); }
const uint8_t *stream_weight(const ggml_tensor *op) { return g_stream->weight(op); }
const uint8_t *stream_expert(const ggml_tensor *op, int thread, int expert) { return g_stream->expert(op, thread, expert); }

extern "C" {
// Called between two steps, like the following functions; returns an errno, or 0. One model at a time.
int edgeinfer_stream_start(int n, const char *const *paths, uint8_t *const *bases, int64_t ring_bytes, int64_t expert_bytes, int64_t streamed_bytes) {
    if (g_stream) return EBUSY;
    auto *stream = new Stream;
    stream->ring_bytes = round_down(ring_bytes), stream->slot_room = round_up(expert_bytes), stream->to_stream = streamed_bytes;
    if (const int code = stream->open(n, paths, bases)) return delete stream, code;
    struct sigaction action {};
    action.sa_sigaction = on_bus_error, action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGBUS, &action, &g_before);
    g_is_damaged = false, g_stream = stream;
    return 0;
}
int edgeinfer_stream_end() { return g_stream ? g_stream->end() : 0; }
// Sets how many bytes of weights the next graphs stream, and how many bytes the experts' slots may take.
void edgeinfer_stream_aim(int64_t streamed_bytes, int64_t expert_bytes) {
    std::lock_guard<std::mutex> lock(g_stream->mutex);
    const auto &sizes = g_stream->free_slots;
    const size_t least = sizes.empty() ? 0 : kLeastSlots * sizes.rbegin()->first;
    g_stream->to_stream = streamed_bytes, g_stream->slot_room = std::max<size_t>(expert_bytes, least), g_stream->is_dirty = true;
}
// Returns bytes read, seconds waited, weights moved to the ring; bytes pinned, streamed, and in slots
void edgeinfer_stream_statistics(double *to) {
    Stream &s = *g_stream;
    std::lock_guard<std::mutex> lock(s.mutex);
    double bytes[kMapped + 1]{};
    for (auto &[data, w] : s.weights) bytes[w.kind] += w.bytes;
    const double all[] = {(double)s.bytes_read, s.waited_s, (double)s.moved, bytes[kFixed] + bytes[kPinned], bytes[kStreamed], (double)s.in_slots};
    memcpy(to, all, sizeof all);
}
void edgeinfer_stream_stop() {
    if (g_is_damaged) restore_pages();
    sigaction(SIGBUS, &g_before, nullptr);
    delete std::exchange(g_stream, nullptr);
}
}
