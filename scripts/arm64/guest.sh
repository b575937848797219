#!/bin/bash
# guest.sh TESTS: the init process of the emulated machine (machine.sh). /work is a disk with checkout, environment and a model.
[ $$ = 1 ] || { echo 'error: guest.sh mounts disks and powers off: run it only in the emulated machine' >&2; exit 1; }
export PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /tmp -o mode=1777
mkdir -p /dev/shm /dev/pts /tmp/etc
mount -t tmpfs tmpfs /dev/shm -o mode=1777
mount -t devpts devpts /dev/pts
ip link set lo up
exec </dev/null
printf 'root:x:0:0::/root:/bin/bash\nuser:x:1000:1000::/work/home:/bin/bash\n' >/etc/passwd
printf 'root:x:0:\nuser:x:1000:\n' >/etc/group
[ "$(stat -c %u /work/home)" = 1000 ] || chown -R 0:0 /work/edgeinfer /work/venv
chown 1000:1000 /work/home
echo "VM $(uname -rm), page size $(getconf PAGESIZE), $(grep -m1 'CPU part' /proc/cpuinfo), $(/work/venv/criu/bin/criu --version | head -1)"
echo "features $(grep -m1 Features /proc/cpuinfo)"

configure() { # HOME: two threads on the one processor, to dump an engine with several threads; no background builds
    install -d -o 1000 -g 1000 "$1/.config" "$1/.config/edgeinfer"
    printf '[load]\nthreads = 2\n[snapshots]\nauto-warm = false\n' >"$1/.config/edgeinfer/config.toml"
}
as_user() { setpriv --reuid 1000 --regid 1000 --clear-groups --inh-caps=-all env HOME=/work/home USER=user "$@"; }
edgeinfer() { as_user /work/venv/bin/edgeinfer "$@"; }
check() { # NAME COMMAND...
    local name=$1 begun=$SECONDS outcome=PASS
    shift
    echo "--- $name"
    "$@" || outcome=FAIL
    echo "=== $name: $outcome ($((SECONDS - begun)) s)"
}

# --- plain: only CRIU, in the namespaces that a launch makes ----------------------------------------------------------------------
plain() { # MEGABYTES THREADS
    rm -rf /work/home/plain
    as_user mkdir -p /work/home/plain/images
    as_user env home=/work/home/plain megabytes=$1 threads=$2 bash /work/edgeinfer/scripts/arm64/cycle.sh
}

# --- kernels: our own NEON kernels are used ----------------------------------------------------------------------------------------
kernels() {
    local features level=dotprod
    features=" $(grep -m1 Features /proc/cpuinfo) "
    [[ $features != *" i8mm "* ]] || level=i8mm
    $program version | tee /tmp/version
    grep -q "kernels $level$" /tmp/version
}

# a receipt of x86-64 has another kernel revision, so the verdict is `within tolerance`
other_receipt() {
    local status=0
    $program verify /work/receipt.json >/tmp/verdict || status=$?
    cat /tmp/verdict
    [ $status = 9 ] && grep -q "differ by 0.000 on average" /tmp/verdict
}

# --- warm: the product, as an ordinary user ---------------------------------------------------------------------------------------
question="The capital of France is"
says() { $program run smollm2-135m-instruct "$question" --temperature 0 --max-tokens 16 "$@"; }
refused_by_page_size() {
    ! says --resume=always >/dev/null 2>/tmp/refused && cat /tmp/refused && grep -q "another page size" /tmp/refused
}
resumed() {
    local status=0
    says --resume=always --timings >/tmp/said 2>/tmp/timings || status=$?
    cat /tmp/said /tmp/timings
    [ $status = 0 ] && [ -s /tmp/said ] && grep -q ": resumed in " /tmp/timings
}
resumed_as_cold() {
    local cold
    cold=$(says --resume=never) && resumed && [ -n "$cold" ] && [ "$cold" = "$(cat /tmp/said)" ]
}

# --- file: the shipped file on a root with only glibc 2.31, as an ordinary user -------------------------------------------------------
in_bare_root() { # COMMAND...
    env -i HOME=/home TERM=dumb LANG=C.UTF-8 python3 /work/edgeinfer/tests/binary/bare.py /work/bare --uid 1000 -- /edgeinfer "$@"
}
install_file() {
    rm -rf /work/bare/{home,tmp}
    mkdir -p /work/bare/{home,tmp,etc,sys}
    cp /work/edgeinfer-aarch64 /work/bare/edgeinfer
    cp /work/model.gguf /work/bare/
    printf 'user:x:1000:1000::/home:/bin/sh\n' >/work/bare/etc/passwd
    chmod 755 /work/bare/edgeinfer
    chmod 1777 /work/bare/tmp
    chown 1000:1000 /work/bare/home
    configure /work/bare/home
}

for tests in ${1//,/ }; do
    case $tests in
    plain)
        check "dump and restore twice, one thread" plain 1 1
        check "dump and restore twice, 64 MiB and 5 threads" plain 64 5
        ;;
    warm)
        program=edgeinfer
        configure /work/home
        check "kernels of our own" kernels
        check "doctor" edgeinfer doctor
        if [ -e /work/home/warmed ]; then
            [ "$(cat /work/home/warmed)" = "$(getconf PAGESIZE)" ] || check "a snapshot of another page size is refused by name" refused_by_page_size
        else
            check "pull a file" edgeinfer pull /work/model.gguf --name smollm2-135m-instruct --quiet
        fi
        check "a receipt of x86-64 has the same probabilities" other_receipt
        check "warm" edgeinfer warm smollm2-135m-instruct
        getconf PAGESIZE >/work/home/warmed
        check "a resumed run says what a cold one says" resumed_as_cold
        check "a second resumed run" resumed
        check "snapshots verify" edgeinfer snapshots verify smollm2-135m-instruct
        ;;
    file)
        program=in_bare_root
        install_file
        check "the file: first launch, kernels of our own" kernels
        check "the file: doctor" in_bare_root doctor
        check "the file: pull a file" in_bare_root pull /model.gguf --name smollm2-135m-instruct --quiet
        check "the file: warm" in_bare_root warm smollm2-135m-instruct
        check "the file: a resumed run says what a cold one says" resumed_as_cold
        check "the file: a second resumed run" resumed
        check "the file: every byte is as built" in_bare_root doctor --verify
        ;;
    esac
done
read -r up _ </proc/uptime
echo "VM done after ${up%.*} s"
sync
echo o >/proc/sysrq-trigger
sleep 60
