#!/usr/bin/env bash
# build_cuda.sh PREFIX: PREFIX/libggml-cuda.so and its JSON file, with the CUDA compiler that PyPI ships; no CUDA of the system.
# build_cuda.sh --kept: print the folder of the build cache that keeps the result, by llama.cpp's version, architectures and scripts.
#
# CUDA_ARCHS names the architectures as CMake does. A real one is code for that GPU, a virtual one is compiled by the driver at
# the first use. One virtual architecture takes half an hour of one core, all of the default about three hours.
# The CUDA runtime is inside the library; cuBLAS is opened at its first use (cublas.c); the driver is the user's: 580 or newer.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/backend.sh"

archs=${CUDA_ARCHS:-75-virtual;80-virtual;86-real;89-real;90-virtual;120a-real}
made_from=$({ cat "$root"/scripts/{build_cuda.sh,backend.sh,cublas.c}; printf '%s\n' "$archs" "$(uname -sm)"; } | sha256sum | cut -c1-12)
kept=${EDGEINFER_BUILD_CACHE:-${XDG_CACHE_HOME:-${HOME:-}/.cache}/edgeinfer-build}/cuda/$llama-$made_from
[ "${1:-}" != --kept ] || { echo "$kept"; exit; }
prefix=$(realpath -m "${1:?usage: build_cuda.sh PREFIX}")
if [ -s "$kept/libggml-cuda.json" ]; then
    mkdir -p "$prefix"
    cp "$kept"/* "$prefix"
    say "$prefix/libggml-cuda.so, from the build cache"
    exit
fi
[ "$(uname -sm)" = "Linux x86_64" ] || die "the CUDA backend is built on Linux x86-64 only, this is $(uname -sm)"
find_programs gcc g++ cmake make strip
mkdir -p "${kept%/*}"
work=$(mktemp -d "${kept%/*}/.cuda.XXXXXX")
trap 'rm -rf "$work"' EXIT

say "fetching the CUDA compiler: six wheels, 525 MB"
"$python" -m pip install -q --no-deps --target "$work/wheels" nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 \
    nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-cublas==13.0.2.14 || die "a download failed" "run it again"
fetch_source "$work"
cuda=$work/wheels/nvidia/cu13
ln -s lib "$cuda/lib64"
ln -s libcudart.so.13 "$cuda/lib/libcudart.so" # by which CMake knows a toolkit; what is linked is the archive
export PATH=$cuda/bin:$cuda/nvvm/bin:$PATH

# cuBLAS: found and opened when it is first called. The driver: its functions by name, of which ggml calls eleven.
gcc -O2 -fPIC -fvisibility=hidden -Wall -I"$cuda/include" -c "$root/scripts/cublas.c" -o "$work/cublas.o"
ar rc "$cuda/lib/libcublas.a" "$work/cublas.o"
mkdir "$cuda/lib/stubs"
for name in DeviceGet DeviceGetAttribute GetErrorString Mem{AddressFree,AddressReserve,Create,GetAllocationGranularity,Map,Release,SetAccess,Unmap}; do
    echo "void cu$name(void) {}"
done | gcc -x c -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$cuda/lib/stubs/libcuda.so" -

say "compiling the CUDA backend of llama-cpp-python $llama for $archs"
compile "$work" cuda -DGGML_CUDA=ON -DGGML_CUDA_NCCL=OFF -DCMAKE_CUDA_ARCHITECTURES="$archs" \
    -DCUDAToolkit_ROOT="$cuda" -DCMAKE_CUDA_COMPILER="$cuda/bin/nvcc" -DCUDA_cuda_driver_LIBRARY="$cuda/lib/stubs/libcuda.so" \
    -DCUDA_cudart_LIBRARY="$cuda/lib/libcudart_static.a" -DCUDA_cublas_LIBRARY="$cuda/lib/libcublas.a" \
    -DCUDA_cublasLt_LIBRARY="$cuda/lib/libcublas.a"
IFS=';' read -ra each <<<"$archs"
describe "$work" cuda cuda "${each[@]}"
rm -rf "$kept"
mv -T "$work/out" "$kept"
mkdir -p "$prefix"
cp "$kept"/* "$prefix"
say "$prefix/libggml-cuda.so ($(du -h "$prefix/libggml-cuda.so" | cut -f1))"
