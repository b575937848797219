// The most products of bytes that two threads sum as 32-bit integers, in G a second: with vpdpbusd (AVX-512 VNNI, AVX-VNNI) where
// the compiler may use it, else with vpmaddubsw, vpmaddwd and vpaddd (AVX2). Then how fast a plain loop reads memory that no cache
// holds (all of the file that is named, mapped as a model is, because parts of a virtual machine's memory differ in speed; else its
// own), in GB a second: with one thread and with two, the best of some rounds, and with two the median.
#include <fcntl.h>
#include <immintrin.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

#define UNROLL _Pragma("GCC unroll 10")  // every loop: the sums stay in registers

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

#if defined(__AVX512VNNI__)
typedef __m512i Bytes;
static inline Bytes all(int x) { return _mm512_set1_epi8(x); }
static inline Bytes add_products(Bytes sum, Bytes x, Bytes y) { return _mm512_dpbusd_epi32(sum, x, y); }
#else
typedef __m256i Bytes;
static inline Bytes all(int x) { return _mm256_set1_epi8(x); }
#if defined(__AVXVNNI__)
static inline Bytes add_products(Bytes sum, Bytes x, Bytes y) { return _mm256_dpbusd_avx_epi32(sum, x, y); }
#else
static inline Bytes add_products(Bytes sum, Bytes x, Bytes y) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(x, y), _mm256_set1_epi16(1)));
}
#endif
#endif

static void *multiply(void *result) {
    Bytes sums[10], x = all(3), y = all(1);
    UNROLL for (int i = 0; i < 10; i++) sums[i] = all(0);
    const long n = 20000000;
    const double began = now();
    for (long k = 0; k < n; k++) {
        UNROLL for (int i = 0; i < 10; i++) {
            __asm__ volatile("" : "+v"(x), "+v"(sums[i]));  // each product is computed
            sums[i] = add_products(sums[i], x, y);
        }
    }
    const double took = now() - began;
    UNROLL for (int i = 0; i < 10; i++) __asm__ volatile("" ::"v"(sums[i]));
    *(double *)result = n * 10.0 * sizeof(Bytes) / took / 1e9;
    return 0;
}

static long part = 128L << 20;  // bytes that each thread reads
static char *memory;
static pthread_barrier_t all_ready;

static void *read_part(void *seconds) {
    const char *from = memory + (long)*(double *)seconds * part;  // the thread's number, before it is the time
    __m256i sums[4] = {{0}};
    pthread_barrier_wait(&all_ready);
    const double began = now();
    for (long at = 0; at < part; at += 128)
        UNROLL for (int i = 0; i < 4; i++) sums[i] = _mm256_xor_si256(sums[i], _mm256_load_si256((const __m256i *)(from + at) + i));
    *(double *)seconds = now() - began;
    UNROLL for (int i = 0; i < 4; i++) __asm__ volatile("" ::"x"(sums[i]));
    return 0;
}

#define ROUNDS 9
static int compare(const void *a, const void *b) { return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b); }
static void read_rates(int n, double *rates) {  // ascending
    pthread_barrier_init(&all_ready, 0, n);
    for (int round = 0; round < ROUNDS; round++) {
        double seconds[2] = {0, 1};
        pthread_t threads[2];
        for (int i = 0; i < n; i++) pthread_create(threads + i, 0, read_part, seconds + i);
        for (int i = 0; i < n; i++) pthread_join(threads[i], 0);
        rates[round] = n * part / (n == 2 && seconds[1] > seconds[0] ? seconds[1] : seconds[0]) / 1e9;
    }
    pthread_barrier_destroy(&all_ready);
    qsort(rates, ROUNDS, sizeof *rates, compare);
}

int main(int argc, char **argv) {
    double rates[2];
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) pthread_create(threads + i, 0, multiply, rates + i);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], 0);
    if (argc == 1) {
        memory = memset(aligned_alloc(128, 2 * part), 1, 2 * part);
    } else {
        struct stat status;
        const int file = open(argv[1], O_RDONLY);
        if (file < 0 || fstat(file, &status)) return 1;
        part = status.st_size / 256 * 128;
        memory = mmap(0, 2 * part, PROT_READ, MAP_SHARED | MAP_POPULATE, file, 0);
    }
    if (memory == MAP_FAILED) return 1;
    double alone[ROUNDS], both[ROUNDS];
    read_rates(1, alone), read_rates(2, both);
    printf("%.1f %.1f %.1f %.1f\n", rates[0] + rates[1], alone[ROUNDS - 1], both[ROUNDS - 1], both[ROUNDS / 2]);
    return 0;
}
