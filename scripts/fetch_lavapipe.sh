#!/usr/bin/env bash
# fetch_lavapipe.sh PREFIX: fetch Mesa's software Vulkan device and the Vulkan loader, to test offload on a machine without a GPU.
#
#   PREFIX/loader/libvulkan.so.1    the loader, for LD_LIBRARY_PATH, or next to a backend library
#   PREFIX/lvp_icd.json             the driver, for VK_DRIVER_FILES and (older loaders) VK_ICD_FILENAMES
#   PREFIX/lib/                     the driver and its libraries, which find each other by $ORIGIN
#
# Environment: LAVAPIPE_SUITE (default bookworm; on Ubuntu jammy, which is untested).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/debian.sh"

readonly LIB=usr/lib/x86_64-linux-gnu
prefix=$(realpath -m "${1:?usage: fetch_lavapipe.sh PREFIX}")
[ ! -e "$prefix" ] || exit 0
[ "$(uname -sm)" = "Linux x86_64" ] || die "lavapipe is fetched only for Linux x86-64, and this is $(uname -sm)"
find_patchelf
mkdir -p "$(dirname "$prefix")"
work=$(mktemp -d "$(dirname "$prefix")/.lavapipe.XXXXXX")
trap 'rm -rf "$work"' EXIT
suite=bookworm
[ "$(. /etc/os-release && echo "$ID")" != ubuntu ] || suite=jammy
open_suite "$work" "${LAVAPIPE_SUITE:-$suite}"
say "downloading mesa-vulkan-drivers and the libraries it needs"
apt-get "${apt[@]}" install --download-only -y mesa-vulkan-drivers libvulkan1 >/dev/null || die "a download failed" "run it again"
unpack_debs "$work/apt/cache/archives" "$work/root"

# the loader, the driver and all libraries that they load, except the C and C++ libraries, which are the system's
mkdir -p "$work/out/lib"
wanted=(libvulkan.so.1 libvulkan_lvp.so)
while [ ${#wanted[@]} -gt 0 ]; do
    soname=${wanted[0]}
    wanted=("${wanted[@]:1}")
    case $soname in libc.so.* | libm.so.* | libdl.so.* | libpthread.so.* | librt.so.* | ld-linux* | libgcc_s.* | libstdc++.*) continue ;; esac
    [ ! -e "$work/out/lib/$soname" ] || continue
    found=$(find "$work/root/$LIB" "$work/root/lib" -name "$soname" 2>/dev/null | head -1)
    [ -n "$found" ] || die "none of the downloaded packages contains $soname"
    cp -L "$found" "$work/out/lib/$soname"
    mapfile -t -O ${#wanted[@]} wanted < <("$patchelf" --print-needed "$work/out/lib/$soname")
    "$patchelf" --force-rpath --set-rpath '$ORIGIN' "$work/out/lib/$soname"
done
mkdir "$work/out/loader"
mv "$work/out/lib/libvulkan.so.1" "$work/out/loader/"
cat >"$work/out/lvp_icd.json" <<EOF
{"ICD": {"api_version": "1.3.230", "library_path": "./lib/libvulkan_lvp.so"}, "file_format_version": "1.0.0"}
EOF
chmod -R u+w,a+rX "$work/out"
mv -T "$work/out" "$prefix"
say "$prefix ($(du -sh "$prefix" | cut -f1))"
