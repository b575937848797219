#!/usr/bin/env bash
# fetch_cross.sh PREFIX: fetch this Debian suite's g++ for arm64 into PREFIX, without root; PREFIX appears complete or not at all.
#
#   PREFIX/bin/aarch64-linux-gnu-g++, -gcc, -strip    the compiler (CXX) of `native/build.sh aarch64`
#   PREFIX/usr/aarch64-linux-gnu/                     libc for arm64; `qemu-aarch64 -L` uses this folder as a program's root
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/debian.sh"

prefix=$(realpath -m "${1:?usage: fetch_cross.sh PREFIX}")
[ ! -e "$prefix" ] || exit 0
mkdir -p "$(dirname "$prefix")"
work=$(mktemp -d "$(dirname "$prefix")/.cross.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{debs,out/bin}
open_suite "$work" "$(. /etc/os-release && echo "$VERSION_CODENAME")"
mapfile -t packages < <(closure g++-aarch64-linux-gnu | grep -vxE 'libc6|libgcc-s1|libstdc\+\+6|lib(asan|lsan|tsan|hwasan)[0-9]-.*')
(cd "$work/debs" && apt-get "${apt[@]}" download "${packages[@]}") || die "a download failed" "run it again"
unpack_debs "$work/debs" "$work/out"
cd "$work/out"
sed -i 's|/usr/aarch64-linux-gnu/lib/||g' usr/aarch64-linux-gnu/lib/libc.so # a linker script with paths of the system
for program in g++ gcc strip; do
    cat >bin/aarch64-linux-gnu-$program <<'SH'
#!/bin/sh
usr=${0%/*}/../usr
export LD_LIBRARY_PATH=$usr/lib/x86_64-linux-gnu PATH=$usr/bin:$PATH
exec "$usr/bin/${0##*/}" "$@"
SH
done
chmod 755 bin/*
chmod -R u+w,a+rX .
mv -T "$work/out" "$prefix"
