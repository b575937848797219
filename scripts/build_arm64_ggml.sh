#!/usr/bin/env bash
# build_arm64_ggml.sh PREFIX: libggml-base.so.0 for arm64 out of llama-cpp-python's source, into PREFIX, which fetch_cross.sh made.
# It is what our kernels call and their test quantizes with, and no more of ggml. 10 s.
#
# Multiplications and additions stay apart, so that it quantizes to the same bits as x86-64's does.
set -euo pipefail
cd "$(dirname "$0")/.."

prefix=$(realpath "${1:?usage: build_arm64_ggml.sh PREFIX}")
llama=$(sed -n 's/.*"llama-cpp-python==\([^"]*\)".*/\1/p' pyproject.toml)
out=$prefix/ggml-$llama
[ ! -e "$out" ] || exit 0
work=$(mktemp -d "$prefix/.ggml.XXXXXX")
trap 'rm -rf "$work"' EXIT
# not --no-binary :all:, which compiles CMake and ninja first
.venv/bin/pip download -q --no-deps --no-binary llama-cpp-python -d "$work" "llama-cpp-python==$llama" >&2
mkdir "$work"/{source,out}
tar xf "$work"/*.tar.gz -C "$work/source" --strip-components=1
cd "$work/source/vendor/llama.cpp/ggml"
sed 's/@[A-Z_]*@/arm64/' src/ggml-version.h.in >include/ggml-version.h
printf '%s\n' ggml.c ggml-quants.c ggml-alloc.c ggml-backend.cpp ggml-threading.cpp | xargs -P "${JOBS:-$(nproc)}" -I{} \
  "$prefix/bin/aarch64-linux-gnu-gcc" -O2 -fPIC -ffp-contract=off -D_GNU_SOURCE -w -Iinclude -Isrc -c src/{} -o "$work/{}.o"
"$prefix/bin/aarch64-linux-gnu-g++" -shared -Wl,-soname,libggml-base.so.0 -o "$work/out/libggml-base.so.0" "$work"/*.o
mv -T "$work/out" "$out"
