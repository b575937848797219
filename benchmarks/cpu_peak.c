// The most that two threads multiply and accumulate with vpdpbusd, in G a second. Needs AVX-512 VNNI.
#include <immintrin.h>
#include <pthread.h>
#include <stdio.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void *multiply(void *result) {
    __m512i sums[12], x = _mm512_set1_epi8(3), y = _mm512_set1_epi8(1);
    for (int i = 0; i < 12; i++) sums[i] = _mm512_setzero_si512();
    const long n = 30000000;
    const double began = now();
    for (long k = 0; k < n; k++) {
        for (int i = 0; i < 12; i++) sums[i] = _mm512_dpbusd_epi32(sums[i], x, y);
        __asm__ volatile("" ::"v"(sums[0]), "v"(sums[1]), "v"(sums[2]), "v"(sums[3]), "v"(sums[4]), "v"(sums[5]), "v"(sums[6]),
                         "v"(sums[7]), "v"(sums[8]), "v"(sums[9]), "v"(sums[10]), "v"(sums[11]));
    }
    const double took = now() - began;
    __m512i all = sums[0];
    for (int i = 1; i < 12; i++) all = _mm512_add_epi32(all, sums[i]);
    volatile int kept = _mm512_reduce_add_epi32(all);
    (void)kept;
    *(double *)result = n * 12 * 64.0 / took / 1e9;
    return 0;
}

int main(void) {
    double rates[2];
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) pthread_create(threads + i, 0, multiply, rates + i);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], 0);
    printf("%.1f\n", rates[0] + rates[1]);
    return 0;
}
