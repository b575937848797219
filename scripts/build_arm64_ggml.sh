#!/usr/bin/env bash
# build_arm64_ggml.sh PREFIX: compile libggml-base.so.0 and libggml-cpu.so.0 for arm64 from llama-cpp-python's source, in 25 s. PREFIX
# is the folder of fetch_cross.sh. Our kernels call the first library; the second computes the other operations of a graph.
#
# The first is compiled without fused multiply-add, as on x86-64, so that both builds quantize bit-identically.
# The second is ggml's variant for ARMv8.2 with dot products, compiled as in a release.
set -euo pipefail
cd "$(dirname "$0")/.."

prefix=$(realpath "${1:?usage: build_arm64_ggml.sh PREFIX}")
llama=$(sed -n 's/.*"llama-cpp-python==\([^"]*\)".*/\1/p' pyproject.toml)
out=$prefix/ggml-$llama
[ ! -e "$out/libggml-cpu.so.0" ] || exit 0
work=$(mktemp -d "$prefix/.ggml.XXXXXX")
trap 'rm -rf "$work"' EXIT
# not --no-binary :all:, which compiles CMake and ninja first
.venv/bin/pip download -q --no-deps --no-binary llama-cpp-python -d "$work" "llama-cpp-python==$llama" >&2
mkdir "$work"/{source,out}
tar xf "$work"/*.tar.gz -C "$work/source" --strip-components=1
cd "$work/source/vendor/llama.cpp/ggml"
sed 's/@[A-Z_]*@/arm64/' src/ggml-version.h.in >include/ggml-version.h
compile() {  # OPTION... -- SOURCE...
  local options=(); while [ "$1" != -- ]; do options+=("$1"); shift; done; shift
  printf '%s\n' "$@" | xargs -P "${JOBS:-$(nproc)}" -I{} "$prefix/bin/aarch64-linux-gnu-gcc" -fPIC -D_GNU_SOURCE -w -Iinclude -Isrc \
    -Isrc/ggml-cpu "${options[@]}" -c src/{} -o {}.o
}
link() {  # NAME OBJECT...
  "$prefix/bin/aarch64-linux-gnu-g++" -shared -Wl,-soname,"$1" -o "$work/out/$1" "${@:2}" -L"$work/out"
}
mkdir -p ggml-cpu/arch/arm
compile -O2 -ffp-contract=off -- ggml.c ggml-quants.c ggml-alloc.c ggml-backend.cpp ggml-threading.cpp
link libggml-base.so.0 ./*.o
compile -O3 -DNDEBUG -march=armv8.2-a+dotprod+fp16 -- ggml-cpu/{ggml-cpu,quants,arch/arm/quants}.c \
  ggml-cpu/{ggml-cpu,ops,binary-ops,unary-ops,vec,traits}.cpp
link libggml-cpu.so.0 ggml-cpu/*.o ggml-cpu/arch/arm/*.o -l:libggml-base.so.0
rm -rf "$out"
mv -T "$work/out" "$out"
