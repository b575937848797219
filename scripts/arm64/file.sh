#!/usr/bin/env bash
# file.sh: build dist/edgeinfer-aarch64, the shipped file for arm64, on x86-64. Root is not needed: since Linux 6.7, a user namespace
# has its own binfmt_misc, by which qemu runs Debian's Python for arm64 with PyInstaller, several times as fast as in the emulated
# machine. Compilers and xz are this machine's. At the end, `edgeinfer version` is run on glibc 2.31.
. "$(dirname "${BASH_SOURCE[0]}")/parts.sh"
compgen -G "$cache/bootloader/pyinstaller-*.tar.gz" >/dev/null ||
    pip download -q --no-deps --no-binary pyinstaller -d "$cache/bootloader" "$(grep -o '^pyinstaller==[0-9.]*' requirements/dev.txt)"

bare=$work/bare
lay_out "$work/disk"
mkdir -p "$work"/disk/{cache,bin} "$parts/build/bootloader" "$root"/{work,proc,dev,tmp,cross,lib64,{lib,usr/lib}/x86_64-linux-gnu}
cp "$cache"/bootloader/pyinstaller-*.tar.gz "$parts/build/bootloader/"
ln -sfn /work/venv/criu "$parts/build/criu"
for program in gcc strip; do
    printf '#!/bin/sh\nexec /cross/bin/aarch64-linux-gnu-%s "$@"\n' $program >"$work/disk/bin/$program"
    chmod 755 "$work/disk/bin/$program"
done
ln -s gcc "$work/disk/bin/cc"
cp -r "$parts/glibc-2.31" "$bare"
mkdir -p "$bare"/{proc,home,tmp}

cat >"$work/inside" <<'INSIDE'
case $1 in
build)
    for place in proc dev lib64 {lib,usr/lib}/x86_64-linux-gnu; do bind /$place "$root/$place"; done
    bind "$work/disk" "$root/work"
    bind "$parts/build" "$root/work/cache"
    bind "$cross" "$root/cross"
    chroot "$root" /sbin/ldconfig
    chroot "$root" /usr/bin/env -i HOME=/work/tmp TMPDIR=/work/tmp LC_ALL=C.UTF-8 EDGEINFER_BUILD_CACHE=/work/cache \
        PATH=/work/bin:/work/venv/bin:/usr/bin:/bin:/usr/sbin:/sbin \
        /bin/bash -c 'cd /work/edgeinfer && exec /work/venv/bin/python build/release.py --tree-only'
    ;;
try)
    bind /proc "$bare/proc"
    env -i HOME=/home "$(command -v chroot)" "$bare" /edgeinfer version
    ;;
esac
INSIDE
say "make binary for arm64, under qemu; log $parts/file.log"
: >"$parts/file.log"
as_arm64 build 2>&1 | tee -a "$parts/file.log" | grep --line-buffered ^binary: >&2 || { tail -20 "$parts/file.log" >&2; die "the file was not built" "the whole log: $parts/file.log"; }
mkdir -p dist
nice -n 5 .venv/bin/python build/finish.py "$work/disk/edgeinfer/work" dist/edgeinfer-aarch64 >&2
cp dist/edgeinfer-aarch64 "$bare/edgeinfer"
as_arm64 try 2>&1 | tee -a "$parts/file.log" >&2 || die "the file does not start on glibc 2.31"
