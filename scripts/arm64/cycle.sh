#!/bin/bash
# cycle.sh: starts park.py as an ordinary user in namespaces like those of a launch, dumps it, and resumes it twice.
# Environment: home (a folder that contains only an empty images/), megabytes, threads
set -e
export XDG_RUNTIME_DIR=$home criu=/work/venv/criu/bin/criu
few=-all,+checkpoint_restore,+sys_ptrace,+setpcap,+sys_admin
export as_criu="setpriv --inh-caps=$few --ambient-caps=$few --bounding-set=$few"
enter="unshare --user --map-user=$(id -u) --map-group=$(id -g) --keep-caps --pid --fork --mount"
mkfifo "$home/wake"
$enter bash -c '
  mount -t proc proc /proc
  echo 999 >/proc/sys/kernel/ns_last_pid
  setsid setpriv --inh-caps=-all --ambient-caps=-all --no-new-privs python3 /work/edgeinfer/scripts/arm64/park.py "$home" $megabytes $threads </dev/null >"$home/out" 2>&1 &
  disown
  until [ -s "$home/parked" ]; do kill -0 $! || { cat "$home/out"; exit 1; }; sleep 0.2; done
  $as_criu $criu --unprivileged dump -t $(cat "$home/parked") -D "$home/images" -o dump.log -v2 || { grep Error "$home/images/dump.log"; exit 1; }'
for _ in 1 2; do
  rm -f "$home/result"
  $enter bash -c '
    mount -t proc proc /proc
    $as_criu timeout -k 1 300 $criu --unprivileged restore -D "$home/images" -d -o restore.log -v2 || { tail -4 "$home/images/restore.log"; exit 1; }
    echo x >"$home/wake"
    for _ in $(seq 600); do [ ! -s "$home/result" ] || break; sleep 0.2; done
    cat "$home/result"; grep -qx same "$home/result"'
done
