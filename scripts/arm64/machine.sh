#!/usr/bin/env bash
# machine.sh TEST...: boot this checkout in an emulated arm64 machine and run tests of guest.sh there, without root and KVM. The
# first call compiles llama.cpp into the build cache (parts.sh); later calls boot after a minute.
#
#   plain     processes with threads and 64 MiB of memory, dumped and resumed by CRIU without edgeinfer
#   warm      doctor, a receipt of x86-64, warm, runs resumed and cold, snapshots verify, as an ordinary user
#   graphs    graphs.sh before the boots: every tensor of the families' graphs has this machine's bits
#   build     file.sh before the boots: dist/edgeinfer-aarch64 of this checkout
#   file      that file, on a root with glibc 2.31 and nothing else: first launch, warm, a resumed run
#
# Environment: PAGES="4k 16k" (kernels), CPUS="max,pauth-impdef=on cortex-a76". Each pair boots in turn with the same disk, where
# each kernel must refuse the snapshot of the one before. The emulated clock counts instructions (500 million a second), so time
# limits do not depend on the load of this machine. There is one emulated processor, because qemu counts instructions on one
# thread, on which a second processor would spend its instructions with waiting for the first.
. "$(dirname "${BASH_SOURCE[0]}")/parts.sh"
read -ra pages <<<"${PAGES-4k 16k}"
read -ra cpus <<<"${CPUS-max,pauth-impdef=on cortex-a76}"
tests=()
for test in "$@"; do
    case $test in
    plain | warm | file) tests+=("$test") ;;
    graphs) scripts/arm64/graphs.sh ;;
    build) scripts/arm64/file.sh ;;
    *) die "no test is named $test" "plain, warm, graphs, build, file" ;;
    esac
done
[ ${#tests[@]} -gt 0 ] || exit 0
[[ " ${tests[*]} " != *" file "* ]] || [ -f dist/edgeinfer-aarch64 ] || die "there is no dist/edgeinfer-aarch64" "TESTS=\"build file\" makes it"

# --- disks -------------------------------------------------------------------------------------------------------------------------
disk() { # FOLDER FILE FREE_MB
    mke2fs -q -t ext4 -E root_owner=0:0 -O ^has_journal -d "$1" "$2" "$(($(du -sm "$1" | cut -f1) * 11 / 10 + $3))M"
}
if [ ! -f "$parts/root.img" ]; then
    mkdir -p "$parts"/root/{work,proc,sys,dev,run,tmp}
    disk "$parts/root" "$parts/root.img.new" 200 && mv "$parts/root.img.new" "$parts/root.img"
fi
lay_out "$work/disk"
cp -r "$parts/glibc-2.31" "$work/disk/bare"
cp "$model" "$work/disk/model.gguf"
chmod 644 "$work/disk/model.gguf"
EDGEINFER_HOME=$cache/test-home .venv/bin/edgeinfer run smollm2-135m-instruct "$(head -c 600 README.md)" --resume=never --seed 7 \
    --max-tokens 64 --receipt "$work/disk/receipt.json" >/dev/null || die "no receipt was made" "make setup"
chmod 644 "$work/disk/receipt.json"
[[ " ${tests[*]} " != *" file "* ]] || cp dist/edgeinfer-aarch64 "$work/disk/"
disk "$work/disk" "$work/disk.img" 8000 # sparse; a snapshot leaves 4 GiB free
rm -rf "$work/disk"

# --- the machine -------------------------------------------------------------------------------------------------------------------
qemu() {
    local program=$parts/qemu/usr/bin/qemu-system-aarch64
    [ -x "$program" ] || { qemu-system-aarch64 "$@"; return; }
    LD_LIBRARY_PATH=$parts/qemu/usr/lib/x86_64-linux-gnu:$parts/qemu/lib/x86_64-linux-gnu \
        "$program" -L "$parts/qemu/usr/share/qemu" -L "$parts/qemu/usr/share/seabios" "$@"
}
initrd() { # PAGES FILE: writes an initrd with Debian's static busybox, and modules for ext4, the disks and the network
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
exec $b switch_root /mnt /bin/bash /work/edgeinfer/scripts/arm64/guest.sh $($b sed -n 's/.*tests=\([^ ]*\).*/\1/p' /mnt/proc/cmdline)
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
since_boot() { while read -r line; do printf '[%4d s] %s\n' $((SECONDS - begun)) "$line"; done; }
for cpu in "${cpus[@]}"; do
    for size in "${pages[@]}"; do
        initrd "$size" "$work/initrd"
        log=$parts/log-$size-${cpu%%,*}
        begun=$SECONDS
        say "booting: $size pages, $cpu, tests ${tests[*]}; log $log"
        nice -n 5 timeout 7200 bash -c "$(declare -f qemu); parts=$parts; qemu \"\$@\"" qemu -M virt -cpu "$cpu" -icount shift=1 -m 4G -nographic \
            -no-reboot -nic none -kernel "$parts/kernel-$size"/boot/vmlinuz-* -initrd "$work/initrd" \
            -drive "file=$parts/root.img,format=raw,if=virtio,snapshot=on" -drive "file=$work/disk.img,format=raw,if=virtio,cache=unsafe" \
            -append "console=ttyAMA0 quiet panic=-1 tests=$(IFS=,; echo "${tests[*]}")" </dev/null 2>&1 | sed -u 's|\r||' | since_boot | tee "$log" | grep --line-buffered -E '\] (===|VM)' || true
        grep -q '\] VM done' "$log" || { tail -20 "$log"; die "the machine did not end by itself"; }
        logs+=("$log")
    done
done
! grep -h '\] === .*: FAIL' "${logs[@]}"
