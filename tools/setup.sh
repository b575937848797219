#!/usr/bin/env bash
# setup.sh [run|lint|full|gpu|test|bench]: what a fresh machine needs, once; a second call takes milliseconds.
#
#   lint                 .venv with the packages of requirements/tools.txt: ruff, mypy, pytest and what the project imports.
#                        Compiles nothing and needs only Python; `make lint` and `make test-fast` need no more
#   run (the default)    that, and llama.cpp compiled for this machine's processor alone (four minutes on 2 cores), our own
#                        C++ (native/build.sh, a minute), and CRIU >= 4.1 in .venv/criu where the system's does not do:
#                        what a first answer needs
#   full                 the packages of requirements/dev.txt; llama.cpp with all CPU variants, of which ggml takes this
#                        machine's at run time (8 to 15 minutes), and ggml's Vulkan backend beside it (6 minutes of one core);
#                        libmtmd, which encodes pictures (native/mtmd.sh, 80 s of one core): what tests and the shipped file
#                        need (docs/decisions/001-one-build.md)
#   gpu                  `run`, and the Vulkan backend. It lies in .venv/lib/edgeinfer/backends, opened when a GPU is asked for
#   test                 `full`; the two real models of the tests, in the build cache; tmux, qemu-user, zsh, fish and Chromium, which
#                        some tests drive, through apt where this is root's call (else it says what to type, and those tests are
#                        skipped); glibc 2.31, which the shipped file is tested on; a compiler for arm64; docker-registry, which some pull from; a
#                        Vulkan device in software; as root also podman and Debian 13's systemd, which run the units and
#                        manifests of docs/
#   bench                `full`; the same two models; llama-server and llama-bench in the build cache, to measure beside
#
# Each build of llama.cpp is a wheel in the build cache. `run` takes the full one if it is there. The builds do not mix: a
# snapshot names the libraries it maps by build id, size and time, and the prefix cache's keys name llama.cpp's build and CPU
# variant. The variant is compiled with the same options in both, so its scores are the same.
#
# Needs: Python >= 3.11 with venv; for all but `lint` gcc, cmake, make. EDGEINFER_BUILD_CACHE moves the cache.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${EDGEINFER_BUILD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/edgeinfer-build}
llama=$(sed -n 's/.*"llama-cpp-python==\([^"]*\)".*/\1/p' pyproject.toml)
backends=$cache/backends/vulkan-$llama-$(printf '%s' "$llama $(uname -sm) $(ldd --version 2>/dev/null | head -1)" | cksum | cut -d' ' -f1)
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '%s\n' "setup: $*" >&2; }
die() { printf 'error: %s\n\nhint: %s\n' "$1" "$2" >&2; exit 1; }

find_python() {  # prefer the system's: an ordinary user can run it too, wherever this checkout lies
  for p in "${PYTHON:-}" /usr/bin/python3 python3 python3.13 python3.12 python3.11; do
    [ -n "$p" ] && "$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$p"; return; }
  done
  die "no Python >= 3.11 with venv" "install it: apt-get install python3 python3-venv python3-dev"
}

make_venv() {
  [ -x .venv/bin/python ] && .venv/bin/python -c '' 2>/dev/null && return
  local py; py=$(find_python)
  say "virtual environment with $("$py" --version) in .venv"
  rm -rf .venv && "$py" -m venv .venv
}

flags="-DGGML_NATIVE=OFF -DGGML_BACKEND_DL=ON -DGGML_CPU_ALL_VARIANTS=ON -DLLAVA_BUILD=OFF"
[ "$(uname -s)" = Linux ] || flags="-DLLAVA_BUILD=OFF"
key=$(printf '%s' "$llama $flags $(uname -sm) $(ldd --version 2>/dev/null | head -1)" | cksum | cut -d' ' -f1)
all_variants=$cache/wheels/llama-$llama-$key
one_variant=$all_variants-cpu$({ grep -m1 -E '^(flags|Features)' /proc/cpuinfo || true; } 2>/dev/null | cksum | cut -d' ' -f1)

build_llama() {  # a wheel in the cache, keyed by what went into it; sets `wheels`
  wheels=$all_variants
  ls "$wheels"/*.whl >/dev/null 2>&1 && return
  for tool in gcc g++ cmake make; do command -v $tool >/dev/null || die "$tool is missing" "apt-get install build-essential cmake"; done
  if [ "$1" = one ] && build_one_variant; then wheels=$one_variant; return; fi
  [ "$(uname -m)" != aarch64 ] || [ "$(gcc -dumpversion | cut -d. -f1)" -ge 14 ] ||
    die "all CPU variants of arm64 need gcc 14" "Debian 13 has it; make setup compiles this processor's variant alone with any gcc"
  say "compiling llama-cpp-python $llama with all CPU variants, once; 8 to 15 minutes on 2 cores"
  local source=$cache/source.$$
  unpack_llama "$source" || die "llama-cpp-python $llama could not be downloaded" "run it again"
  compile_wheel "$wheels" "$source" || die "llama-cpp-python did not compile" "the whole log: $log"
  rm -rf "$source"
}

unpack_llama() {  # FOLDER
  mkdir -p "$1"
  # not --no-binary :all:, which compiles CMake and ninja first
  .venv/bin/pip download -q --no-deps --no-binary llama-cpp-python -d "$1" "llama-cpp-python==$llama" >/dev/null 2>&1 &&
    tar xf "$1"/*.tar.gz -C "$1" --strip-components=1
}

build_one_variant() {  # fails if this machine's variant is not known: then all are compiled
  ls "$one_variant"/*.whl >/dev/null 2>&1 && return
  local source=$cache/source.$$ variant done=1
  if unpack_llama "$source" && variant=$(.venv/bin/python tools/one_variant.py "$source"); then
    say "compiling llama-cpp-python $llama for this processor ($variant), once; about four minutes on 2 cores"
    compile_wheel "$one_variant" "$source" && unzip_names "$one_variant" | grep "libggml-cpu-$variant\.so" >/dev/null && done=0
    [ $done = 0 ] || rm -rf "$one_variant"
  fi
  rm -rf "$source"
  return $done
}

unzip_names() { .venv/bin/python -m zipfile -l "$1"/*.whl; }

compile_wheel() {  # FOLDER SOURCE: sets `log`. Another place of the sources gives the same bytes
  local out=$1 started=$SECONDS step='' last='' pid map=-ffile-prefix-map=$2=.
  mkdir -p "$out.tmp" "$cache/logs"
  log=$cache/logs/$(basename "$out").log
  CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-$(nproc)} CMAKE_ARGS=$flags CFLAGS=$map CXXFLAGS=$map \
    .venv/bin/pip wheel -v --no-deps -w "$out.tmp" "$2" >"$log" 2>&1 &
  pid=$!
  while kill -0 $pid 2>/dev/null; do
    sleep 2
    step=$(grep -oE '^ *\[[0-9]+/[0-9]+\]' "$log" 2>/dev/null | tail -1 | tr -d ' ' || true)
    [ "$step" = "$last" ] && continue
    if [ -t 2 ]; then printf '\rsetup: compiling %s, %d s ' "$step" $((SECONDS - started)) >&2
    elif [ $(( (SECONDS - started) % 30 )) -lt 3 ]; then say "compiling $step, $((SECONDS - started)) s"; fi
    last=$step
  done
  [ -t 2 ] && printf '\n' >&2
  wait $pid || { tail -20 "$log" >&2; rm -rf "$out.tmp"; return 1; }
  rm -rf "$out" && mv "$out.tmp" "$out"
  say "compiled in $((SECONDS - started)) s; the wheel is kept in the build cache"
}

build_vulkan() {
  [ -d "$backends" ] && return
  [ "$(uname -s)" = Linux ] || return 0
  nice -n 5 tools/build_vulkan.sh "$backends" >&2 || say "no Vulkan backend: without it nothing runs on a GPU"
}

install_vulkan() {
  [ -d "$backends" ] || return 0
  mkdir -p .venv/lib/edgeinfer
  ln -sfn "$backends" .venv/lib/edgeinfer/backends
}

install_native() {
  [ "$(uname -s)" = Linux ] || return 0
  native/build.sh "$@" >&2 || say "our own C++ did not compile: llama.cpp's kernels serve, and a GPU that is lost ends the process"
}

install_mtmd() {
  [ "$(uname -s)" = Linux ] || return 0
  native/mtmd.sh "$cache/mtmd" >&2 || say "libmtmd did not compile: models read no pictures"
}

# Packages come from the lock files, each checked against its hashes; `make lock` writes those. A full environment is not
# reduced again by `run` or `lint`. The stamps say what was installed from what.
install_packages() {  # tools|dev
  local want; want="$(cksum <requirements/dev.txt) $(cksum <requirements/tools.txt)"
  [ "$(cat .venv/.packages 2>/dev/null)" != "dev $want" ] || return 0
  [ "$(cat .venv/.packages 2>/dev/null)" != "$1 $want" ] || return 0
  say "installing the packages of requirements/$1.txt"
  rm -f .venv/.packages
  if command -v uv >/dev/null && [ "$1" = tools ]; then
    uv pip install -q --python .venv/bin/python --no-deps --require-hashes -r requirements/tools.txt
  else
    .venv/bin/pip install -q --upgrade pip  # what older ones write as `edgeinfer` imports `re`: 3 ms a start
    .venv/bin/pip install -q --no-deps --no-compile --require-hashes -r "requirements/$1.txt"
  fi
  printf '%s' "$1 $want" > .venv/.packages
}

install() {  # again only when pyproject.toml, the packages or the wheel changed
  local stamp=.venv/.installed want; want=$(cat pyproject.toml .venv/.packages <(ls "$wheels"; echo "$wheels") | cksum)
  [ "$(cat $stamp 2>/dev/null)" = "$want" ] && return
  say "installing llama-cpp-python and this project"
  .venv/bin/pip install -q --no-deps --force-reinstall "$wheels"/*.whl
  # a plain path: a finder costs 10 ms a start
  .venv/bin/pip install -q --no-deps --config-settings editable_mode=compat -e .
  .venv/bin/python -m compileall -q edgeinfer .venv/lib/python3*/site-packages >/dev/null 2>&1 || true
  printf '%s' "$want" > $stamp
}

install_criu() {
  [ -x .venv/criu/bin/criu ] && return
  [ "$(uname -s)" = Linux ] || { say "snapshots need Linux: launches will be cold"; return 0; }
  if criu_works "$(command -v criu || true)"; then return; fi
  command -v apt-get >/dev/null || { say "no CRIU >= 4.1 and no apt: launches will be cold (install criu to change that)"; return 0; }
  say "CRIU >= 4.1 into .venv/criu"
  tools/fetch_criu.sh .venv/criu >&2 || say "could not get CRIU: launches will be cold"
}

criu_works() {  # a version the design needs (snapshots/criu.py), and able to run here
  local minor=1
  ! grep -qm1 '^Features.* paca' /proc/cpuinfo || minor=2
  [ -n "$1" ] && "$1" --version 2>/dev/null |
    awk -v minor=$minor '/Version/ { split($2, v, "."); ok = v[1] > 4 || (v[1] == 4 && v[2] >= minor) } END { exit !ok }'
}

test_models() {
  for model in smollm2-135m-instruct gemma-3-270m; do
    [ -f "$cache/test-home/data/models/$model/model.json" ] && continue
    EDGEINFER_HOME=$cache/test-home .venv/bin/python -c 'import sys; from edgeinfer.cli.main import main; sys.exit(main())' pull $model >&2
  done
}

test_programs() {
  local missing=()
  command -v tmux >/dev/null || missing+=(tmux)
  command -v qemu-x86_64 >/dev/null || missing+=(qemu-user)
  command -v curl >/dev/null || missing+=(curl)
  command -v zsh >/dev/null || missing+=(zsh)
  command -v fish >/dev/null || missing+=(fish)
  command -v node >/dev/null || missing+=(nodejs npm)
  command -v chromium >/dev/null || missing+=(chromium fonts-dejavu-core)
  [ "$(id -u)" != 0 ] || command -v runc >/dev/null || missing+=(podman runc)
  [ ${#missing[@]} = 0 ] && return
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing ${missing[*]} for the tests"
    { apt-get update -qq && apt-get install -qq -y --no-install-recommends "${missing[@]}"; } >/dev/null && return
  fi
  say "tests that need ${missing[*]} are skipped: apt-get install ${missing[*]}"
}

test_axe() {  # checks the page for accessibility
  local axe=$cache/axe version=4.14.1 sum=29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c
  [ ! -f "$axe/axe.min.js" ] || return 0
  mkdir -p "$axe.tmp"
  if (cd "$axe.tmp" && npm pack --silent "axe-core@$version" >/dev/null && tar xzf axe-core-*.tgz && sha256sum package/axe.min.js | grep -q "^$sum "); then
    mkdir -p "$axe" && mv "$axe.tmp/package/axe.min.js" "$axe/"
  else
    say "could not get axe-core $version: the tests of the page's accessibility are skipped"
  fi
  rm -rf "$axe.tmp"
}

test_libc() {
  [ -d "$cache/glibc-2.31" ] || ! command -v apt-get >/dev/null || tools/fetch_libc.sh "$cache/glibc-2.31" >&2 ||
    say "could not get glibc 2.31: the tests of the shipped file are skipped"
}

test_cross() {
  local cross=$cache/cross-arm64
  [ "$(uname -m)" = x86_64 ] && command -v apt-get >/dev/null || return 0
  [ -d "$cross" ] || tools/fetch_cross.sh "$cross" >&2 && tools/build_arm64_ggml.sh "$cross" >&2 && native/build.sh aarch64 "$cross/native" >&2 ||
    say "could not get a compiler for arm64: the tests of its kernels are skipped"
}

test_registry() {
  [ -x "$cache/docker-registry" ] || ! command -v apt-get >/dev/null || tools/fetch_registry.sh "$cache/docker-registry" >&2 ||
    say "could not get docker-registry: the tests of registries are skipped"
}

test_systemd() {
  [ "$(id -u)" != 0 ] || [ -d "$cache/systemd-257" ] || ! command -v apt-get >/dev/null ||
    tools/fetch_systemd.sh "$cache/systemd-257" >&2 || say "could not get Debian 13's systemd: the test of the units fails"
}

test_vulkan() {
  [ -d "$cache/lavapipe" ] || ! command -v apt-get >/dev/null || tools/fetch_lavapipe.sh "$cache/lavapipe" >&2 ||
    say "could not get Mesa's software device: the tests of offload are skipped"
}

peers() {
  [ -n "${EDGEINFER_LLAMA_SERVER:-}" ] || command -v llama-server >/dev/null ||
    tools/fetch_llama_server.sh "$cache/llama-server" >/dev/null || say "could not get llama-server: nothing to measure beside"
}

mode=${1:-run}
case $mode in run | lint | full | gpu | test | bench) ;; *) die "no such set: $mode" "setup.sh [run|lint|full|gpu|test|bench]" ;; esac
make_venv
if [ "$mode" = lint ]; then install_packages tools; exit; fi
mkdir -p "$cache"; exec 9>"$cache/setup.lock"; flock 9 2>/dev/null || true  # two checkouts share the cache, not the folder
case $mode in
  run | gpu) packages=tools variants=one levels=here ;;
  *) packages=dev variants=all levels= ;;
esac
vulkan=
[ $mode = run ] || { build_vulkan & vulkan=$!; }
build_llama $variants; install_packages $packages; install; install_native $levels; install_criu
[ $mode = run ] || install_mtmd
[ -z "$vulkan" ] || wait $vulkan
install_vulkan
case $mode in
  test) test_programs; test_axe; test_models; test_libc; test_cross; test_registry; test_vulkan; test_systemd ;;
  bench) test_models; peers ;;
esac
