#!/usr/bin/env bash
# run.sh [OUT]: install the kit next to this file, check offload to this machine's GPU, write the figure. Uses no network.
#
# OUT (default ./out) gets gpu.md (the figure of docs/figures), summary.txt, results.jsonl (output of gpu_check.py), log.txt, and
# steps/ with each step's output. The summary names each step that fails or exceeds its time limit; the other steps still run.
#
# Environment: GPU_KIT_BACKEND=vulkan (cuda), GPU_KIT_DEVICES=Vulkan0,…; GPU_KIT_MODELS="small,4b-q4_k_m" of bench_gpu.py;
# GPU_KIT_STEPS="install probe lost-idle" runs only these; GPU_KIT_PYTHON=PROGRAM; GPU_KIT_SMALL=1 for a software device.
# `lost-…` destroy only the CUDA context of their own process, and `full-…` only allocate memory: no setting of the card changes.
set -uo pipefail
umask 022  # edgeinfer opens no library in a folder that a group can change
kit=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=$(realpath -m "${1:-$kit/out}")
mkdir -p "$out/steps" "$kit/home"
exec > >(tee "$out/log.txt") 2>&1
version=$(cat "$kit/python-version")
export HOME=$kit/home EDGEINFER_HOME=$kit/home/edgeinfer EDGEINFER_BUILD_CACHE=$kit/home/cache PYTHONUNBUFFERED=1
export GPU_KIT_BACKEND=${GPU_KIT_BACKEND:-$([ -s "$kit/backends/user/libggml-cuda.so" ] && echo cuda || echo vulkan)}
tree=$kit/tree python=$kit/tree/.venv/bin/python
: >"$out/results.jsonl"; : >"$out/steps.tsv"

step() {  # NAME LIMIT_S COMMAND...
    local name=$1 limit=$2 rc=0 start=$SECONDS; shift 2
    [ -z "${GPU_KIT_STEPS:-}" ] || [[ " $GPU_KIT_STEPS " == *" $name "* ]] || return 0
    echo "=== $name (limit $limit s)"
    (cd "$tree" && exec timeout -k 5 "$limit" "$@") >"$out/steps/$name.out" 2>"$out/steps/$name.err" </dev/null || rc=$?
    grep -h '^{"check"' "$out/steps/$name.out" >>"$out/results.jsonl"
    tail -4 "$out/steps/$name.out" | cut -c1-300
    [ "$rc" = 0 ] || { echo "--- exit $rc:"; tail -4 "$out/steps/$name.err" | cut -c1-300; }
    printf '%s\t%s\t%s\n' "$name" "$rc" "$((SECONDS - start))" >>"$out/steps.tsv"
}
check() { local name=$1 limit=$2; shift 2; step "$name" "$limit" "$python" scripts/gpu/gpu_check.py "$@"; }

install() {
    set -e
    local program=${GPU_KIT_PYTHON:-python$version} site=$tree/.venv/lib/python$version/site-packages
    command -v "$program" >/dev/null || { echo "error: this kit needs Python $version: install it, or pack with KIT_PYTHON" >&2; exit 1; }
    rm -rf "$tree/.venv"
    "$program" -m venv --without-pip "$tree/.venv"
    for wheel in "$kit"/wheels/*.whl; do "$program" -m zipfile -e "$wheel" "$site"; done
    cp -a "$kit"/llama/. "$site/"
    mkdir -p "$tree/.venv/lib/edgeinfer" "$EDGEINFER_HOME/data/backends"
    cp -a "$kit/native" "$tree/.venv/lib/edgeinfer/native"
    cp -a "$kit/backends/program" "$tree/.venv/lib/edgeinfer/backends"
    cp -a "$kit"/backends/user/. "$EDGEINFER_HOME/data/backends/"
    echo "$tree" >"$site/edgeinfer.pth"
    printf '#!%s\nimport sys\nfrom edgeinfer.launcher import main\nsys.exit(main())\n' "$python" >"$tree/.venv/bin/edgeinfer"
    chmod +x "$tree/.venv/bin/edgeinfer"
    if [ -d "$kit/criu" ]; then cp -a "$kit/criu" "$tree/.venv/criu"; "$python" "$kit/repath_criu.py" "$tree/.venv/criu"; fi
    local models=$EDGEINFER_BUILD_CACHE/test-home/data/models/smollm2-135m-instruct
    mkdir -p "$models"
    ln -sf "$kit"/*.gguf "$models/"
    "$tree/.venv/bin/edgeinfer" version
}
tiny() {
    "$python" -c "
import sys; sys.path.insert(0, 'tests/made')
from pathlib import Path
from made_models import make_llama
make_llama(Path('$kit/home/tiny.gguf'), 4096)"
}
machine() {
    nvidia-smi || true
    uname -a; head -2 /etc/os-release; nproc; free -g | head -2; grep -m1 'model name' /proc/cpuinfo
    ls /dev/nvidia* /dev/dri /dev/kfd 2>/dev/null | tr '\n' ' '; echo
    ldconfig -p | grep -E 'libcuda\.so|libcublas|libvulkan' || true
}
export -f install machine tiny; export kit tree python version

step machine 30 bash -c machine
step install 300 bash -c install
[ -x "$python" ] || { echo "the installation failed: the other steps are left out"; exit 1; }
step tiny 60 bash -c tiny
step doctor 60 "$tree/.venv/bin/edgeinfer" doctor
text=$(ls "$kit"/*.gguf 2>/dev/null | head -1); [ -n "$text" ] && [ -z "${GPU_KIT_SMALL:-}" ] || text=$kit/home/tiny.gguf
check probe 60 probe "$GPU_KIT_BACKEND"
check texts 120 texts "$text"
check blocks 120 blocks "$text"
check logits 60 logits "$text"
check logits-q8 60 logits "$text" q8_0
check plan 120 plan "$text"
software=$([ -z "${GPU_KIT_SMALL:-}" ] || echo --software)
[ ! -x "$kit/llama-bench" ] || export EDGEINFER_LLAMA_BENCH=$kit/llama-bench
# shellcheck disable=SC2086
step figure 1800 "$python" benchmarks/bench_gpu.py --models "${GPU_KIT_MODELS:-small,0.6b-q4_k_m,4b-q4_k_m}" --runs 3 --out "$out" $software
if [ "$GPU_KIT_BACKEND" = cuda ]; then
    for when in before after; do check "full-$when" 120 full "$when" "$text"; done
    for when in answer idle close; do check "lost-$when" 90 lost "$when" "$text"; done
    step split 90 env GGML_CUDA_DEVICES=2 "$python" scripts/gpu/gpu_check.py split "$text"
fi
"$python" "$kit/summary.py" "$out" | tee "$out/summary.txt"
