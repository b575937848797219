#!/usr/bin/env bash
# mtmd.sh CACHE: libedgeinfer-mtmd.so.1, which encodes pictures, into .venv/lib/edgeinfer/native. It is the core of llama.cpp's
# tools/mtmd, from the sources of llama-cpp-python's own release, with that wheel's headers and libraries: without CMake, a second
# ggml, an image decoder or a vendored C library. Takes 80 s of one core, once; CACHE keeps it.
set -euo pipefail
cd "$(dirname "$0")/.."

site=$(echo "$PWD"/.venv/lib/python3*/site-packages)
out=.venv/lib/edgeinfer/native/libedgeinfer-mtmd.so.1
llama=$(sed -n 's/.*"llama-cpp-python==\([^"]*\)".*/\1/p' pyproject.toml)
made_from=$({ cat native/mtmd.sh; printf '%s\n' "$llama" "$(uname -sm)" "$(g++ --version 2>&1 | head -1)" "$(ldd --version 2>&1 | head -1)"; } |
  sha256sum | cut -c1-12)
kept=$1/mtmd-$llama-$made_from.so
if [ ! -s "$kept" ]; then
  command -v g++ >/dev/null || { echo "error: g++ is missing" >&2; exit 1; }
  mkdir -p "$1"
  work=$(mktemp -d "$1/.build.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  # not --no-binary :all:, which compiles CMake and ninja first
  .venv/bin/pip download -q --no-deps --no-binary llama-cpp-python -d "$work" "llama-cpp-python==$llama" >&2
  mkdir "$work/source"
  tar xf "$work"/*.tar.gz -C "$work/source" --strip-components=1
  tools=$work/source/vendor/llama.cpp/tools/mtmd
  printf '#include "%s"\n' "$tools"/models/*.cpp >"$work/models.cpp"  # one unit: the headers are most of their time
  options=(-O2 -DNDEBUG -fPIC -fvisibility=hidden -ffunction-sections -fdata-sections -w -std=c++17
    -DLLAMA_SHARED -DLLAMA_BUILD -DGGML_BACKEND_SHARED -DGGML_SHARED "-ffile-prefix-map=$work=."
    -I"$tools" -I"$tools/models" -I"$tools/../../vendor" -I"$site/include")
  printf '%s\n' "$work/models.cpp" "$tools"/{clip,mtmd,mtmd-image,mtmd-audio}.cpp |
    xargs -P "${JOBS:-$(nproc)}" -I{} nice -n 10 sh -c 'source=$1; shift; cd "$0"; g++ "$@" -c "$source"' "$work" {} "${options[@]}"
  g++ -shared -s -Wl,--gc-sections -Wl,-soname,"${out##*/}" -o "$work/made" "$work"/*.o \
    -L"$site/llama_cpp/lib" -l:libllama.so.0 -l:libggml.so.0 -l:libggml-base.so.0 -lpthread
  mv "$work/made" "$kept"
fi
mkdir -p "${out%/*}"
cmp -s "$kept" "$out" || { cp "$kept" "$out.new" && mv "$out.new" "$out"; }
