#!/usr/bin/env bash
# fetch_libc.sh PREFIX: fetch Debian 11's glibc 2.31, for tests that run the shipped file on a root with only this glibc.
#
#   PREFIX/lib/MULTIARCH/, PREFIX/lib64/     as in the package libc6; ARCH=arm64 fetches the one for arm64
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/debian.sh"

prefix=$(realpath -m "${1:?usage: fetch_libc.sh PREFIX}")
[ ! -e "$prefix" ] || exit 0
mkdir -p "$(dirname "$prefix")"
work=$(mktemp -d "$(dirname "$prefix")/.libc.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{debs,out}
open_suite "$work" bullseye "${ARCH:-}"
(cd "$work/debs" && apt-get "${apt[@]}" download libc6) || die "a download failed" "run it again"
unpack_debs "$work/debs" "$work/root"
rm -rf "$work"/root/lib/*-linux-gnu/gconv
mv "$work/root/lib" "$work/out/lib"
mkdir "$work/out/lib64" # programs for x86-64 name this folder for their ld.so
[ ! -d "$work/out/lib/x86_64-linux-gnu" ] || ln -s ../lib/x86_64-linux-gnu/ld-2.31.so "$work/out/lib64/ld-linux-x86-64.so.2"
chmod -R u+w,a+rX "$work/out"
mv -T "$work/out" "$prefix"
