#!/usr/bin/env bash
# build.sh: compiles our own C++ into .venv/lib/edgeinfer/native. Takes half a minute per level, once: the build cache keeps
# libraries until a source, the compiler or llama.cpp's version changes. An unchanged file is not replaced: snapshots map it.
#
#   libedgeinfer-guard.so.1           guard.cpp
#   libedgeinfer-cells.so.1           cells.cpp
#   libedgeinfer-kernels-LEVEL.so.1   kernels.cpp, attention.cpp, cell_order.cpp, matmul.cpp, adapters.cpp, elementwise.cpp,
#                                     streaming.cpp; LEVEL is v3 for AVX2 (x86-64-v3), v3-vnni with AVX-VNNI, v4 for AVX-512 with
#                                     VNNI; on arm64 dotprod (ARMv8.2) and i8mm (ARMv8.6)
#
# usage: build.sh [here|aarch64 OUT]; `here`: only the level that this machine's processor needs; `aarch64`: every level of
# arm64, into OUT, with the compiler $CXX, or by default that of scripts/fetch_cross.sh in the build cache
set -euo pipefail
cd "$(dirname "$0")/.."

site=$(echo .venv/lib/python3*/site-packages)
cache=${EDGEINFER_BUILD_CACHE:-${XDG_CACHE_HOME:-${HOME:-}/.cache}/edgeinfer-build}
out=.venv/lib/edgeinfer/native machine=$(uname -m) CXX=${CXX:-g++}
if [ "${1:-}" = aarch64 ]; then
  out=$2
  [ "$machine" = aarch64 ] || [ "$CXX" != g++ ] || CXX=$cache/cross-arm64/bin/aarch64-linux-gnu-g++
  machine=aarch64
fi
llama=$(sed -n 's/.*"llama-cpp-python==\([^"]*\)".*/\1/p' pyproject.toml)
made_from() { cat "$@" native/build.sh; printf '%s\n' "$llama" "$machine" "$("$CXX" --version 2>&1 | head -1)"; }
case $machine in
  x86_64) every="v3 v3-vnni v4" ;;
  aarch64) every="dotprod i8mm" ;;
  *) every= ;;
esac
levels=$every
all=$(made_from native/*.cpp native/*.h | cksum)
if [ "${1:-}" = here ]; then
  case " $(grep -m1 -E '^(flags|Features)' /proc/cpuinfo) " in
    *" avx512_vnni "*) levels=v4 ;;
    *" avx_vnni "*) levels=v3-vnni ;;
    *" avx2 "*) levels=v3 ;;
    *" i8mm "*) levels=i8mm ;;
    *" asimddp "*) levels=dotprod ;;
    *) levels= ;;
  esac
fi
built=$(cat "$out/.built" 2>/dev/null || true)
[ "$built" != "$all $every" ] && [ "$built" != "$all $levels" ] || exit 0
command -v "$CXX" >/dev/null || { echo "error: $CXX is missing" >&2; exit 1; }

mkdir -p "$out"
mkdir -p "$cache/native" 2>/dev/null || true
work=$(mktemp -d "$out/.build.XXXXXX")
trap 'rm -rf "$work"' EXIT
include=${CPATH:-$site/include} # the sources' own while the wheel compiles
headers=$(cat "$include"/ggml{,-alloc,-backend}.h | cksum | cut -d" " -f1)
library() {  # NAME SOURCE... -- OPTION...
  local file=libedgeinfer-$1.so.1 sources=() version kept new; shift
  while [ "$1" != -- ]; do sources+=("native/$1"); shift; done
  shift
  version=$(made_from "${sources[@]}" native/*.h | sha256sum | cut -c1-12)
  kept=$cache/native/$version-$headers-$file
  if [ -s "$kept" ]; then
    cp "$kept" "$work/$file"
  else
    "$CXX" -shared -fPIC -s -DEDGEINFER_VERSION="\"$version\"" -o "$work/$file" "${sources[@]}" native/version.cpp "$@"
    new=$(mktemp "$kept.XXXXXX" 2>/dev/null) && chmod 755 "$new" && cp "$work/$file" "$new" && mv "$new" "$kept" || rm -f "$new"
  fi
  cmp -s "$work/$file" "$out/$file" || mv "$work/$file" "$out/$file"
}

# by name, because another machine's library is not available
"$CXX" -shared -nostdlib -Wl,-soname,libggml-base.so.0 -o "$work/libggml-base.so.0" -x c /dev/null
ggml=(-I"$include" -L"$work" -Wl,--push-state,--no-as-needed -l:libggml-base.so.0 -Wl,--pop-state)
library guard guard.cpp -- -O2
library cells cells.cpp -- -O2 "${ggml[@]}"
kernels() {  # LEVEL OPTION...; no -Wall: gcc 12 warns of variables in the intrinsics' headers
  library "kernels-$1" kernels.cpp attention.cpp cell_order.cpp matmul.cpp adapters.cpp elementwise.cpp streaming.cpp -- -O3 -pthread "${@:2}" "${ggml[@]}"
}
compilers=()
for level in $levels; do
  case $level in
    v3) kernels v3 -march=x86-64-v3 & ;;
    v3-vnni) kernels v3-vnni -march=x86-64-v3 -mavxvnni & ;;
    v4) kernels v4 -march=x86-64-v4 -mavx512vnni & ;;
    dotprod) kernels dotprod -march=armv8.2-a+dotprod & ;;
    i8mm) kernels i8mm -march=armv8.2-a+dotprod+i8mm & ;;
  esac
  compilers+=($!)
done
for compiler in "${compilers[@]}"; do wait "$compiler"; done
printf '%s' "$all $levels" >"$out/.built"
