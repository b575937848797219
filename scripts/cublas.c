/* cuBLAS at its first use, instead of when the CUDA backend is loaded: the library takes 600 MB, and quantized models on a
 * GPU from Turing on hardly call it. Linked into libggml-cuda.so by build_cuda.sh in its place.
 *
 * It is looked for as EDGEINFER_CUBLAS names it, then as the dynamic linker does: next to libggml-cuda.so, too. Where it is
 * not, cublasCreate fails and cublasGetStatusString says what to install; ggml writes that to its log and gives up. */
#include <cublas_v2.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static void *library;

static void open_library(void) {
    const char *named = getenv("EDGEINFER_CUBLAS");
    if (named && *named) library = dlopen(named, RTLD_NOW | RTLD_LOCAL);
    if (!library) library = dlopen("libcublas.so.13", RTLD_NOW | RTLD_LOCAL);
}

static void *find(const char *name) {
    pthread_once(&once, open_library);
    return library ? dlsym(library, name) : NULL;
}

#define FORWARD(name, types, names)                                  \
    cublasStatus_t CUBLASWINAPI name types {                         \
        static cublasStatus_t (*real) types;                         \
        if (!real) *(void **)&real = find(#name);                    \
        return real ? real names : CUBLAS_STATUS_NOT_INITIALIZED;    \
    }

const char *CUBLASWINAPI cublasGetStatusString(cublasStatus_t status) {
    const char *(*real)(cublasStatus_t);
    *(void **)&real = find("cublasGetStatusString");
    if (real) return real(status);
    return "this model needs cuBLAS, and libcublas.so.13 is not here: install NVIDIA's cuBLAS 13, or pip install nvidia-cublas";
}

FORWARD(cublasCreate_v2, (cublasHandle_t *handle), (handle))
FORWARD(cublasDestroy_v2, (cublasHandle_t handle), (handle))
FORWARD(cublasSetStream_v2, (cublasHandle_t handle, cudaStream_t stream), (handle, stream))
FORWARD(cublasSetMathMode, (cublasHandle_t handle, cublasMath_t mode), (handle, mode))
FORWARD(cublasSetWorkspace_v2, (cublasHandle_t handle, void *space, size_t size), (handle, space, size))

#define SHAPE cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k

FORWARD(cublasSgemm_v2,
        (cublasHandle_t handle, SHAPE, const float *alpha, const float *A, int lda, const float *B, int ldb, const float *beta,
         float *C, int ldc),
        (handle, ta, tb, m, n, k, alpha, A, lda, B, ldb, beta, C, ldc))
FORWARD(cublasSgemmBatched,
        (cublasHandle_t handle, SHAPE, const float *alpha, const float *const A[], int lda, const float *const B[], int ldb,
         const float *beta, float *const C[], int ldc, int count),
        (handle, ta, tb, m, n, k, alpha, A, lda, B, ldb, beta, C, ldc, count))
FORWARD(cublasSgemmStridedBatched,
        (cublasHandle_t handle, SHAPE, const float *alpha, const float *A, int lda, long long sa, const float *B, int ldb,
         long long sb, const float *beta, float *C, int ldc, long long sc, int count),
        (handle, ta, tb, m, n, k, alpha, A, lda, sa, B, ldb, sb, beta, C, ldc, sc, count))
FORWARD(cublasStrsmBatched,
        (cublasHandle_t handle, cublasSideMode_t side, cublasFillMode_t fill, cublasOperation_t trans, cublasDiagType_t diagonal,
         int m, int n, const float *alpha, const float *const A[], int lda, float *const B[], int ldb, int count),
        (handle, side, fill, trans, diagonal, m, n, alpha, A, lda, B, ldb, count))
FORWARD(cublasGemmEx,
        (cublasHandle_t handle, SHAPE, const void *alpha, const void *A, cudaDataType at, int lda, const void *B,
         cudaDataType bt, int ldb, const void *beta, void *C, cudaDataType ct, int ldc, cublasComputeType_t type,
         cublasGemmAlgo_t algorithm),
        (handle, ta, tb, m, n, k, alpha, A, at, lda, B, bt, ldb, beta, C, ct, ldc, type, algorithm))
FORWARD(cublasGemmBatchedEx,
        (cublasHandle_t handle, SHAPE, const void *alpha, const void *const A[], cudaDataType at, int lda,
         const void *const B[], cudaDataType bt, int ldb, const void *beta, void *const C[], cudaDataType ct, int ldc, int count,
         cublasComputeType_t type, cublasGemmAlgo_t algorithm),
        (handle, ta, tb, m, n, k, alpha, A, at, lda, B, bt, ldb, beta, C, ct, ldc, count, type, algorithm))
FORWARD(cublasGemmStridedBatchedEx,
        (cublasHandle_t handle, SHAPE, const void *alpha, const void *A, cudaDataType at, int lda, long long sa, const void *B,
         cudaDataType bt, int ldb, long long sb, const void *beta, void *C, cudaDataType ct, int ldc, long long sc, int count,
         cublasComputeType_t type, cublasGemmAlgo_t algorithm),
        (handle, ta, tb, m, n, k, alpha, A, at, lda, sa, B, bt, ldb, sb, beta, C, ct, ldc, sc, count, type, algorithm))
