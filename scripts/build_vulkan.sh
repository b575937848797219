#!/usr/bin/env bash
# build_vulkan.sh PREFIX: compile ggml's Vulkan backend, in six minutes of one core, unless PREFIX exists.
#
#   PREFIX/libggml-vulkan.so, .json    the library, and a description of its build
#   PREFIX/share/doc/*/copyright       the licences of the headers that are compiled into it
#   PREFIX/share/packages.tsv          package, version, source, source version, SHA-256 of the .deb
#
# The shader compiler and the headers are trixie's, unpacked into a temporary folder: Debian 12's glslc omits the shaders for
# tensor cores and integer dot products, and its headers are too old for ggml-vulkan.cpp. Without apt, the system's own are
# used. The Vulkan loader is not needed: a stub library gives the linker its name.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/backend.sh"

prefix=$(realpath -m "${1:?usage: build_vulkan.sh PREFIX}")
[ ! -e "$prefix" ] || exit 0
find_programs gcc g++ cmake make strip
mkdir -p "$(dirname "$prefix")"
work=$(mktemp -d "$(dirname "$prefix")/.vulkan.XXXXXX")
trap 'rm -rf "$work"' EXIT

shader_compiler() {  # sets `options`
    open_suite "$work" trixie
    apt-get "${apt[@]}" install --download-only -y glslc >/dev/null || die "a download failed" "run it again"
    mkdir "$work/headers"
    (cd "$work/headers" && apt-get "${apt[@]}" download libvulkan-dev spirv-headers) || die "a download failed" "run it again"
    unpack_debs "$work/apt/cache/archives" "$work/root"
    unpack_debs "$work/headers" "$work/root"
    list_packages "$work/headers" "$work/root" "$work/out/share"
    local usr=$work/root/usr
    cat >"$work/glslc" <<EOF
#!/bin/sh
exec $(find "$usr" -name 'ld-linux-x86-64.so.2' | head -1) --library-path $usr/lib/x86_64-linux-gnu $usr/bin/glslc "\$@"
EOF
    chmod +x "$work/glslc"
    # if glslc does not start, CMake would assume that it supports every extension
    "$work/glslc" --version >/dev/null || die "the fetched glslc does not start"
    options=(-DVulkan_GLSLC_EXECUTABLE="$work/glslc" -DVulkan_INCLUDE_DIR="$usr/include"
        -DSPIRV-Headers_DIR="$usr/share/cmake/SPIRV-Headers")
}

options=()
if command -v apt-get >/dev/null && [ "$(uname -sm)" = "Linux x86_64" ]; then
    shader_compiler
else
    glslc --version >/dev/null 2>&1 || die "glslc is missing" "install shaderc, and the headers of Vulkan and SPIR-V"
fi
fetch_source "$work"
echo 'void vkGetInstanceProcAddr(void) {}' |
    gcc -x c -shared -fPIC -Wl,-soname,libvulkan.so.1 -o "$work/libvulkan.so" -
say "compiling the Vulkan backend of llama-cpp-python $llama, once"
compile "$work" vulkan -DGGML_VULKAN=ON -DVulkan_LIBRARY="$work/libvulkan.so" "${options[@]}"
describe "$work" vulkan vulkan
mv -T "$work/out" "$prefix"
say "$prefix/libggml-vulkan.so ($(du -sh "$prefix" | cut -f1))"
