#!/usr/bin/env bash
# build.sh: the libraries of our own C++, into .venv/lib/edgeinfer/native. Seconds; again when a source, the compiler or
# llama.cpp's version is another. A file that comes out the same stays: snapshots map it.
#
#   libedgeinfer-guard.so.1           guard.cpp
#   libedgeinfer-cells.so.1           cells.cpp
#   libedgeinfer-kernels-LEVEL.so.1   kernels.cpp, attention.cpp, matmul.cpp; LEVEL is v3 for AVX2 (x86-64-v3), v3-vnni
#                                     with AVX-VNNI, v4 for AVX-512 with VNNI; on x86-64 alone
set -euo pipefail
cd "$(dirname "$0")/.."

site=$(echo .venv/lib/python3*/site-packages)
out=.venv/lib/edgeinfer/native
llama=$(sed -n 's/.*"llama-cpp-python==\([^"]*\)".*/\1/p' pyproject.toml)
made_from() { cat "$@" native/build.sh; printf '%s\n' "$llama" "$(uname -sm)" "$(g++ --version 2>&1 | head -1)"; }
want=$(made_from native/*.cpp native/*.h | cksum)
[ "$(cat "$out/.built" 2>/dev/null)" != "$want" ] || exit 0
command -v g++ >/dev/null || { echo "error: g++ is missing" >&2; exit 1; }

mkdir -p "$out"
work=$(mktemp -d "$out/.build.XXXXXX")
trap 'rm -rf "$work"' EXIT
library() {  # NAME SOURCE... -- OPTION...
  local file=libedgeinfer-$1.so.1 sources=() version; shift
  while [ "$1" != -- ]; do sources+=("native/$1"); shift; done
  shift
  version=$(made_from "${sources[@]}" native/hook.h | sha256sum | cut -c1-12)
  g++ -shared -fPIC -s -DEDGEINFER_VERSION="\"$version\"" -o "$work/$file" "${sources[@]}" native/version.cpp "$@"
  cmp -s "$work/$file" "$out/$file" || mv "$work/$file" "$out/$file"
}

ggml=(-I"$site/include" -L"$site/llama_cpp/lib" -l:libggml-base.so.0)
library guard guard.cpp -- -O2
library cells cells.cpp -- -O2 "${ggml[@]}"
kernels() {  # LEVEL OPTION...; no -Wall: gcc 12 warns of variables in the intrinsics' headers
  library "kernels-$1" kernels.cpp attention.cpp matmul.cpp -- -O3 "${@:2}" "${ggml[@]}"
}
if [ "$(uname -sm)" = "Linux x86_64" ]; then
  levels=()
  kernels v4 -march=x86-64-v4 -mavx512vnni & levels+=($!)
  kernels v3 -march=x86-64-v3 && kernels v3-vnni -march=x86-64-v3 -mavxvnni & levels+=($!)
  for level in "${levels[@]}"; do wait "$level"; done
fi
printf '%s' "$want" >"$out/.built"
