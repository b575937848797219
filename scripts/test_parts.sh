#!/usr/bin/env bash
# test_parts.sh test|test-all: installs programs that tests use. Called by setup.sh. A program that cannot be installed is reported,
# and its tests are skipped.
#
#   test      tmux and curl through apt if run as root; Chromium too, but in the background, while test-programs.lock in the build
#             cache is locked: the tests that need Chromium wait for that lock
#   test-all  also libpython (for the shipped file), qemu-user, zsh, fish, node (for axe-core), glibc 2.31 (to test the shipped
#             file), a compiler for arm64, docker-registry, Mesa's software GPU; for root podman and Debian 13's systemd
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${EDGEINFER_BUILD_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/edgeinfer-build}

say() { printf '%s\n' "setup: $*" >&2; }
is_root() { [ "$(id -u)" = 0 ]; }

missing=()
need() {  # PROGRAM PACKAGE...
  command -v "$1" >/dev/null || missing+=("${@:2}")
}

install_missing() {
  [ ${#missing[@]} -gt 0 ] || return 0
  if is_root && command -v apt-get >/dev/null; then
    say "installing ${missing[*]} for the tests"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}"; } >/dev/null 2>&1 && return
  fi
  say "tests that need ${missing[*]} are skipped: apt-get install ${missing[*]}"
}

fetch() {  # FILE WHAT COMMAND...: runs COMMAND if FILE is missing
  [ -e "$cache/$1" ] || ! command -v apt-get >/dev/null || "${@:3}" >&2 || say "could not get $2: its tests are skipped"
}

fetch_axe() {  # axe-core checks the web page's accessibility
  local version=4.14.1 sum=29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c
  rm -rf "$cache/axe.tmp" && mkdir -p "$cache/axe.tmp"
  (cd "$cache/axe.tmp" && npm pack --silent "axe-core@$version" >/dev/null && tar xzf axe-core-*.tgz &&
    sha256sum package/axe.min.js | grep -q "^$sum " && mv package ../axe)
}

fetch_cross() {
  scripts/fetch_cross.sh "$cache/cross-arm64" && scripts/build_arm64_ggml.sh "$cache/cross-arm64" && native/build.sh aarch64 "$cache/cross-arm64/native"
}

need tmux tmux; need curl curl
if [ "$1" = test-all ]; then
  need qemu-x86_64 qemu-user; need zsh zsh; need fish fish; need node nodejs npm; need chromium chromium fonts-dejavu-core
  ! is_root || need runc podman runc
  .venv/bin/python -c 'import ctypes, sysconfig; ctypes.CDLL(sysconfig.get_config_var("INSTSONAME"))' 2>/dev/null ||
    missing+=("libpython$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_python_version())')")
  install_missing
  fetch axe/axe.min.js axe-core fetch_axe
  fetch glibc-2.31 "glibc 2.31" scripts/fetch_libc.sh "$cache/glibc-2.31"
  [ "$(uname -m)" != x86_64 ] || fetch cross-arm64/native "a compiler for arm64" fetch_cross
  fetch docker-registry docker-registry scripts/fetch_registry.sh "$cache/docker-registry"
  fetch lavapipe "Mesa's software GPU" scripts/fetch_lavapipe.sh "$cache/lavapipe"
  ! is_root || fetch systemd-257 "Debian 13's systemd" scripts/fetch_systemd.sh "$cache/systemd-257"
else
  install_missing
  missing=()
  need chromium chromium fonts-dejavu-core
  exec 8>"$cache/test-programs.lock"; flock 8
  install_missing 8>&8 & # inherits the lock
fi
