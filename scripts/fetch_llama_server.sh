#!/usr/bin/env bash
# fetch_llama_server.sh PREFIX: fetch llama.cpp's llama-server and llama-bench, for comparisons. Prints the programs' folder.
#
# The programs have a fixed version of Debian's newest suite (PEER), with their libraries and libc; the system is not changed.
# ggml's CPU variants are next to the programs, which look there for the one that fits this processor. Figures of different
# versions are not comparable: once Debian has a newer version, change PEER and run the benchmarks again. LLAMA_VERSION selects
# another version for one run; PREFIX/version has the version, which the head of each figure names.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/debian.sh"

readonly LIB=usr/lib/x86_64-linux-gnu PEER=${LLAMA_VERSION:-1:0.7.0+dfsg-2}
prefix=$(realpath -m "${1:?usage: fetch_llama_server.sh PREFIX}")
if [ "$(cat "$prefix/version" 2>/dev/null)" = "$PEER" ]; then echo "$prefix/bin" && exit; fi
find_patchelf
mkdir -p "$(dirname "$prefix")"
work=$(mktemp -d "$(dirname "$prefix")/.llama.XXXXXX")
trap 'rm -rf "$work"' EXIT
open_suite "$work" "${LLAMA_SUITE:-sid}"
versions=$(apt-cache "${apt[@]}" show llama.cpp-tools | sed -n 's/^Version: //p')
grep -qxF "$PEER" <<<"$versions" ||
    die "Debian has llama.cpp-tools $(tr '\n' ' ' <<<"$versions")instead of $PEER" "LLAMA_VERSION=${versions%%$'\n'*} takes that for now"
say "downloading llama.cpp-tools $PEER and the libraries it needs"
apt-get "${apt[@]}" install --download-only -y "llama.cpp-tools=$PEER" >/dev/null || die "a download failed" "run it again"
unpack_debs "$work/apt/cache/archives" "$work/root"
root=$work/root

# --- let the libraries find each other in PREFIX, and the programs PREFIX's ld.so -----------------------------------------
paths=$prefix/$LIB
for folder in "$root/$LIB"/*/; do
    ! compgen -G "$folder*.so*" >/dev/null || paths=$paths:$prefix/$LIB/$(basename "$folder")
done
find "$root/$LIB" -type f -name '*.so*' ! -name 'ld-linux*' ! -name 'libc.so*' -print0 |
    while IFS= read -r -d '' library; do "$patchelf" --force-rpath --set-rpath "$paths" "$library" 2>/dev/null || true; done
mkdir -p "$work/out/bin" "$work/out/usr"
cp -a "$root/usr/lib" "$work/out/usr/"
for program in llama-server llama-bench; do
    cp "$root/usr/bin/$program" "$work/out/bin/"
    "$patchelf" --set-interpreter "$prefix/$LIB/ld-linux-x86-64.so.2" --force-rpath --set-rpath "$paths" "$work/out/bin/$program"
done
for variant in "$work/out/$LIB"/ggml/backends*/libggml-*.so; do
    ln -sf "../${variant#"$work/out/"}" "$work/out/bin/"
done
printf '%s\n' "$PEER" >"$work/out/version"
chmod -R u+w,a+rX "$work/out"
[ ! -x "$prefix/bin/llama-server" ] || rm -rf "$prefix" # an older version
mv -T "$work/out" "$prefix"
"$prefix/bin/llama-server" --version >&2 || die "the fetched llama-server does not start" "remove $prefix and run it again"
echo "$prefix/bin"
