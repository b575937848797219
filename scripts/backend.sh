# Sourced by build_vulkan.sh and build_cuda.sh: one backend of ggml, compiled as a library of its own from the very source
# that the llama-cpp-python of pyproject.toml is compiled from.
#
#   $llama                              its version
#   find_programs NAME...               dies with what to install where one is missing
#   fetch_source WORK                   its source distribution, unpacked in WORK/source
#   compile WORK BACKEND OPTION...      libggml-BACKEND.so, stripped, in WORK/out, and the JSON file that says what it is of
#
# JOBS in the environment is how many compilers run at once; all cores otherwise.
. "$(dirname "${BASH_SOURCE[0]}")/debian.sh"

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
llama=$(sed -n 's/.*"llama-cpp-python==\([^"]*\)".*/\1/p' "$root/pyproject.toml")
python=$root/.venv/bin/python

find_programs() {
    local name
    for name in "$@"; do
        command -v "$name" >/dev/null || die "$name is missing" "apt-get install build-essential cmake git binutils"
    done
}

fetch_source() {
    # not --no-binary :all:, which compiles CMake and ninja first
    "$python" -m pip download -q --no-deps --no-binary llama-cpp-python -d "$1/sdist" "llama-cpp-python==$llama" 2>"$1/pip.log" ||
        { cat "$1/pip.log" >&2; die "llama-cpp-python $llama could not be downloaded" "run it again"; }
    mkdir -p "$1/source"
    tar xf "$1"/sdist/*.tar.gz -C "$1/source" --strip-components=1
}

compile() {  # the CPU's variants are in the wheel already: GGML_CPU=OFF
    local work=$1 backend=$2 generator=() library=libggml-$2.so
    shift 2
    ! command -v ninja >/dev/null || generator=(-G Ninja)
    cmake "${generator[@]}" -S "$work/source/vendor/llama.cpp" -B "$work/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
        -DGGML_BACKEND_DL=ON -DGGML_NATIVE=OFF -DGGML_CPU=OFF \
        -DLLAMA_BUILD_{COMMON,TESTS,TOOLS,EXAMPLES,SERVER,APP}=OFF \
        -DCMAKE_C_FLAGS="-ffile-prefix-map=$work=." -DCMAKE_CXX_FLAGS="-ffile-prefix-map=$work=." \
        -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON -DCMAKE_INSTALL_RPATH='$ORIGIN' "$@" >"$work/cmake.log" 2>&1 ||
        { tail -20 "$work/cmake.log" >&2; die "CMake refused the $backend backend"; }
    cmake --build "$work/build" --target "ggml-$backend" -j "${JOBS:-$(nproc)}" >"$work/build.log" 2>&1 ||
        { tail -20 "$work/build.log" >&2; die "the $backend backend did not compile"; }
    mkdir -p "$work/out"
    strip -o "$work/out/$library" "$work/build/bin/$library"
    chmod 644 "$work/out/$library"
}

describe() {  # WORK BACKEND NAME [ARCHITECTURE...]: what edgeinfer.runtime.llama.backends reads
    local work=$1 library=$1/out/libggml-$2.so name=$3
    shift 3
    local of='{"name": "%s", "build": {"binding": "%s", "ggml": "%s", "commit": "%s", "machine": "%s"}'
    of+=', "sha256": "%s", "size_bytes": %d, "architectures": [%s]}\n'
    # shellcheck disable=SC2059
    printf "$of" "$name" "$llama" "$(sed -n 's/^-- ggml version: *//p' "$work/cmake.log")" \
        "$(sed -n 's/^-- ggml commit: *//p' "$work/cmake.log")" "$(uname -sm | tr 'A-Z ' 'a-z-')" \
        "$(sha256sum "$library" | cut -d' ' -f1)" "$(stat -c %s "$library")" \
        "$(printf '"%s", ' "$@" | sed 's/"", //; s/, $//')" >"${library%.so}.json"
}
