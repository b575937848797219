#!/usr/bin/env bash
# fetch_criu.sh PREFIX [--force]: fetch a CRIU that can resume without root into PREFIX. The system's own CRIU stays as it is.
#
# Debian 12's CRIU (3.17) cannot dump without root, nor read the vdso of a kernel >= 6.13. This script takes Debian 13's CRIU,
# with its libraries and libc, from the mirrors of this machine's apt; apt checks the packages against Debian's keys. Root is
# not needed, because apt gets a separate state directory. PREFIX appears complete, by one rename, or not at all.
#
#   PREFIX/bin/criu                  the program; edgeinfer starts it as a separate process, and never links or loads it
#   PREFIX/lib/                      CRIU's libraries, which find each other by $ORIGIN, and its ld.so
#   PREFIX/share/doc/*/copyright     the licences (CRIU: GPL-2.0)
#   PREFIX/share/packages.tsv        package, version, source, source version, SHA-256 of the .deb
#
# The path of an ELF interpreter cannot be relative. It is the path of the ld.so in PREFIX/lib, padded with leading slashes to
# INTERP_LENGTH bytes, so that a copy of PREFIX can get its new path in the same bytes (`edgeinfer.shipping.payload.relocate`).
#
# Environment: PATCHELF (the patchelf to use), CRIU_SUITE (default trixie; for arm64 forky, whose CRIU 4.2 can restore on
# processors with pointer authentication; on Ubuntu questing, which is untested), CRIU_ARCH (amd64 or arm64; a CRIU for another
# architecture than this machine's is fetched, but not started).
set -euo pipefail

readonly INTERP_LENGTH=1023
readonly LAYOUT=1 # stored in PREFIX/share/layout; after a change of this number, CRIU is fetched again

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/debian.sh"
prefix=$(realpath -m "${1:?usage: fetch_criu.sh PREFIX [--force]}")
here_arch=$(uname -m | sed 's/x86_64/amd64/; s/aarch64/arm64/')
arch=${CRIU_ARCH:-$here_arch}
suite=trixie
case $arch in
    amd64) multiarch=x86_64-linux-gnu ld=ld-linux-x86-64.so.2 ;;
    arm64) multiarch=aarch64-linux-gnu ld=ld-linux-aarch64.so.1 suite=forky ;;
    *) die "CRIU is fetched only for Linux on x86-64 and arm64, and this is $(uname -sm)" ;;
esac

works() { [ "$arch" != "$here_arch" ] || [ "$("$prefix/bin/criu" --version 2>/dev/null | sed -n 's/^Version: \([0-9]*\)\..*/\1/p')" -ge 4 ] 2>/dev/null; }
if [ "${2:-}" != --force ] && [ "$(cat "$prefix/share/layout" 2>/dev/null)" = $LAYOUT ] && works; then
    say "$prefix already contains CRIU: nothing to do"
    exit 0
fi

find_patchelf

mkdir -p "$(dirname "$prefix")" 2>/dev/null && [ -w "$(dirname "$prefix")" ] || die "cannot write to $(dirname "$prefix")"
work=$(mktemp -d "$(dirname "$prefix")/.criu.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'say "stopped at line $LINENO: $BASH_COMMAND"' ERR
chmod 755 "$work"

# --- the packages of CRIU ----------------------------------------------------------------------------------------------
[ "$(. /etc/os-release && echo "$ID")" != ubuntu ] || suite=questing
suite=${CRIU_SUITE:-$suite}
mkdir "$work/debs"
open_suite "$work" "$suite" "$arch"

# The package criu depends on Python for tools that are not used here, so only criu and libraries are downloaded.
mapfile -t packages < <(apt-get "${apt[@]}" -s install criu | sed -n 's/^Inst \([^ ]*\) .*/\1/p' |
    grep -E '^(criu$|lib)' | grep -vE '^lib(python|perl|crypt1|ssl|sqlite|ncurses|readline|tinfo|expat|db5)')
[[ " ${packages[*]} " == *" criu "* ]] || die "$suite has no criu for $arch"
say "downloading ${#packages[@]} packages"
(cd "$work/debs" && apt-get "${apt[@]}" download "${packages[@]}") || die "a download failed" "run it again"
unpack_debs "$work/debs" "$work/root"

# --- only the program and the libraries that it loads ------------------------------------------------------------------
out=$work/out
mkdir -p "$out"/{bin,lib,share/doc}
cp "$work/root/usr/sbin/criu" "$out/bin/criu"
find_library() { find "$work/root" \( -path "*/$multiarch/*" -o -path '*/lib64/*' \) -name "$1" | sort | head -1; }
wanted=("$out/bin/criu")
sources=("$work/root/usr/sbin/criu")
while [ ${#wanted[@]} -gt 0 ]; do
    file=${wanted[0]}
    wanted=("${wanted[@]:1}")
    for soname in $("$patchelf" --print-needed "$file"); do
        [ ! -e "$out/lib/$soname" ] || continue
        found=$(find_library "$soname")
        [ -n "$found" ] || die "none of the downloaded packages contains $soname"
        found=$(realpath "$found")
        cp "$found" "$out/lib/$soname"
        sources+=("$found")
        wanted+=("$out/lib/$soname")
    done
done
for so in "$out"/lib/*; do
    chmod 644 "$so"
    case $(basename "$so") in $ld | libc.so.6) ;; *) "$patchelf" --force-rpath --set-rpath '$ORIGIN' "$so" ;; esac
done
chmod 755 "$out/lib/$ld" "$out/bin/criu"

interpreter=$prefix/lib/$ld
[ ${#interpreter} -le $INTERP_LENGTH ] || die "$prefix is too long: at most $((INTERP_LENGTH - ${#ld} - 5)) characters"
padding=$(printf '%*s' $((INTERP_LENGTH - ${#interpreter})) '')
"$patchelf" --set-interpreter "${padding// //}$interpreter" --force-rpath --set-rpath '$ORIGIN/../lib' "$out/bin/criu"

# --- the origin of each file -------------------------------------------------------------------------------------------
for deb in "$work"/debs/*.deb; do
    dpkg-deb -c "$deb" | awk '{print $6}' | sed 's|^\.|'"$work/root"'|' >"$work/files"
    used=
    for source in "${sources[@]}"; do
        if grep -qxF "$source" "$work/files" || grep -qxF "${source/\/root\/usr\/lib\//\/root\/lib\/}" "$work/files"; then used=1; fi
    done
    [ -n "$used" ] || rm "$deb"
done
list_packages "$work/debs" "$work/root" "$out/share"
grep -q '^criu	' "$out/share/packages.tsv" || die "no file of the package criu was recognized: the package's layout has changed"
echo $LAYOUT >"$out/share/layout"
chmod -R u+w,a+rX "$out"

if [ -e "$prefix" ]; then mv "$prefix" "$work/old"; fi
mv -T "$out" "$prefix"
if ! works; then
    say "the fetched criu does not start: $("$prefix/bin/criu" --version 2>&1 | head -3)"
    mv "$prefix" "$work/broken"
    [ ! -e "$work/old" ] || mv "$work/old" "$prefix"
    die "$prefix was not changed"
fi
say "$(sed -n 's/^criu\t\([^\t]*\).*/CRIU \1/p' "$prefix/share/packages.tsv") in $prefix ($(du -sh "$prefix" | cut -f1))"
