"""The shipped file under the units of docs/systemd, run by Debian 13's systemd: it is process 1 of a root and
a network of its own, and starts the user manager of an ordinary user.
"""

import os
import shutil
import subprocess
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from other_processes import run, wait_until

from ..conftest import BUILD_CACHE, ROOT, flip_bit

UID = 65533
HOME = "/home/person"
RUNTIME = "/run/person"
MODEL = "smollm2-135m-instruct"
PERSON = """
    [Service]
    Type=notify
    User=person
    Environment=XDG_RUNTIME_DIR=/run/person HOME=/home/person
    RuntimeDirectory=person
    RuntimeDirectoryMode=0700
    Delegate=yes
    WorkingDirectory=/home/person
    ExecStart=/usr/lib/systemd/systemd --user
"""
#: Makes the root the only one, with mounts of its own as a container has them, and becomes its systemd.
BOOT = """
    set -eu
    mount --make-rprivate / && mount --bind "$1" "$1" && cd "$1" && mkdir -p old
    mount -t proc proc proc && mount -t tmpfs tmpfs run && mount -t sysfs sysfs sys
    mount -t cgroup2 cgroup2 sys/fs/cgroup
    mount -t tmpfs -o mode=755 tmpfs dev
    for name in null zero full random urandom tty; do
        touch dev/$name && mount --bind /dev/$name dev/$name
    done
    mkdir dev/shm dev/pts && mount -t tmpfs -o mode=1777 tmpfs dev/shm
    mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
    ln -s pts/ptmx dev/ptmx && ln -s /proc/self/fd dev/fd
    pivot_root . old && umount -l /old
    exec env -i container=edgeinfer PATH=/usr/bin /usr/lib/systemd/systemd --unit=person.service
"""


class Systemd:
    """A running systemd, and commands in its namespaces."""

    def __init__(self, process: subprocess.Popen[bytes], root: Path) -> None:
        self.process, self.root = process, root
        self.home = root / HOME[1:]

    def run(self, *command: str, as_person: bool = True) -> subprocess.CompletedProcess[str]:
        person = (f"--setuid={UID}", f"--setgid={UID}") if as_person else ()
        entered = ["nsenter", f"--target={self.pid}", "--all", *person, "--", "env", f"--chdir={HOME}"]
        environment = {"HOME": HOME, "XDG_RUNTIME_DIR": RUNTIME, "PATH": "/usr/bin", "LANG": "C.UTF-8"}
        return run(*entered, *command, env=environment, check=False)

    @property
    def pid(self) -> int:
        """Process 1 of the namespaces, the only child of `unshare --fork`; 0 until it is systemd."""
        children = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        for child in Path(children).read_text().split():
            if Path(f"/proc/{child}/comm").read_text() == "systemd\n":
                return int(child)
        return 0

    def control(self, *arguments: str) -> str:
        done = self.run("systemctl", "--user", *arguments)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout.strip()

    def wait_until(self, unit: str, state: str) -> None:
        def has_state() -> bool:
            now = self.run("systemctl", "--user", "is-active", unit).stdout.strip()
            assert now != "failed" or now == state, self.log()
            return now == state

        wait_until(has_state, f"{unit} to be {state}")

    def log(self) -> str:
        return self.run("journalctl", "--no-pager", "-o", "cat", as_person=False).stdout


@pytest.fixture
def systemd(tmp_path, binary, smollm2) -> Iterator[Systemd]:
    """A machine whose ordinary user has the shipped file and, by it, a model and its snapshot."""
    fetched = BUILD_CACHE / "systemd-257"
    if os.getuid() != 0:
        pytest.skip("a systemd as process 1 needs root")
    assert fetched.is_dir(), "scripts/setup.sh test-all fetches Debian 13's systemd"
    root = tmp_path / "root"
    shutil.copytree(fetched, root, symlinks=True)
    person = f"person:x:{UID}:{UID}::{HOME}:/bin/sh"
    (root / "etc/passwd").write_text(f"root:x:0:0::/root:/bin/sh\n{person}\n")
    (root / "etc/group").write_text(f"root:x:0:\nperson:x:{UID}:\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    (root / "etc/systemd/system").mkdir(parents=True, exist_ok=True)
    (root / "etc/systemd/system/person.service").write_text(textwrap.dedent(PERSON))
    home = root / HOME[1:]
    units = home / ".config/systemd/user"
    shutil.copytree(ROOT / "docs/systemd", units)
    (home / ".local/bin").mkdir(parents=True)
    shutil.copy(binary, home / ".local/bin/edgeinfer")
    shutil.copy(smollm2, home / "small.gguf")
    for path in (home, *home.rglob("*")):
        os.chown(path, UID, UID)
    unified = Path("/sys/fs/cgroup/unified")
    group = unified if unified.is_dir() else unified.parent
    group /= f"edgeinfer-test-{os.getpid()}"
    group.mkdir()
    namespaces = ["--mount", "--pid", "--fork", "--cgroup", "--uts", "--ipc", "--net"]
    process = subprocess.Popen(
        ["unshare", *namespaces, "--", "bash", "-c", BOOT, "boot", str(root)],
        preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    machine = Systemd(process, root)
    try:
        _wait_for_manager(machine)
        program = f"{HOME}/.local/bin/edgeinfer"
        for command in (["pull", f"{HOME}/small.gguf", "--name", MODEL], ["warm", MODEL]):
            done = machine.run(program, *command)
            assert done.returncode == 0, done.stderr
        yield machine
    finally:
        (group / "cgroup.kill").write_text("1")
        process.wait(60)
        _remove_groups(group)


def _wait_for_manager(machine: Systemd) -> None:
    def is_running() -> bool:
        assert machine.process.poll() is None, "systemd ended"
        state = machine.pid and machine.run("systemctl", "--user", "is-system-running").stdout.strip()
        return state in ("running", "degraded")

    wait_until(is_running, "the user manager")


def _remove_groups(group: Path) -> None:
    """Remove a control group and those in it, once their processes are gone."""
    for folder, _, _ in os.walk(group, topdown=False):
        for _ in range(100):
            try:
                os.rmdir(folder)
                break
            except OSError:
                time.sleep(0.05)


def test_socket_unit_resumes_the_endpoint_after_an_idle_exit(systemd):
    """A connection starts the service, which exits when idle and is resumed at the next connection."""
    # the unit as shipped, but for the seconds it waits before it exits
    shipped = "serve --idle-exit 600"
    unit = systemd.home / ".config/systemd/user/edgeinfer.service"
    assert shipped in unit.read_text()
    unit.write_text(unit.read_text().replace(shipped, "serve --idle-exit 1"))
    systemd.control("daemon-reload")
    systemd.control("enable", "--now", "edgeinfer.socket")
    for _ in range(2):
        systemd.wait_until("edgeinfer.service", "inactive")
        answer = systemd.run(
            "bash", "-c",
            "exec 3<>/dev/tcp/127.0.0.1/8080; printf 'GET /infer?prompt=Hello&max_tokens=4 HTTP/1.1\\r\\n"
            "host: localhost\\r\\nconnection: close\\r\\n\\r\\n' >&3; cat <&3",
        )  # fmt: skip
        assert answer.stdout.startswith("HTTP/1.1 200"), (answer, systemd.log())
        systemd.wait_until("edgeinfer.service", "inactive")
    log = systemd.log()
    assert '"start": "resumed"' in log or "resumed" in log, log
    assert "cold" not in log, log


def test_canary_unit_fails_after_a_bit_of_the_model_has_changed(systemd):
    systemd.control("enable", "--now", "edgeinfer-canary.timer")
    assert "edgeinfer-canary.timer" in systemd.control("list-timers", "--all")
    systemd.control("start", "edgeinfer-canary.service")
    (model,) = (systemd.home / ".local/share/edgeinfer/models").glob(f"{MODEL}*/*.gguf")
    times = model.stat()
    flip_bit(model, times.st_size // 2)
    os.utime(model, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert systemd.run("systemctl", "--user", "start", "edgeinfer-canary.service").returncode != 0
    systemd.wait_until("edgeinfer-canary.service", "failed")
    assert f"{model.name} changed since it was built" in systemd.log()
