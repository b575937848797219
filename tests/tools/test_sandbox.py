"""Scripts that try to break out of the sandbox, use it up, or outlive it."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from edgeinfer.tools import sandbox as module
from edgeinfer.tools.sandbox import Sandbox
from edgeinfer.tools.uses import Stop

pytestmark = pytest.mark.slow  # starts programs
MARK = "86399.5"  # an argument of `sleep` that no other process has


@pytest.fixture
def folder(tmp_path, monkeypatch):
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "id").write_text("secret key")
    (home / "project").mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TOKEN", "secret token")
    return home / "project"


@pytest.fixture
def sandbox(folder):
    made = Sandbox(folder, ("shell", "python"), 20.0)
    if why := made.unavailable():
        pytest.skip(f"no sandbox: {why}")
    return made


def sh(sandbox, command, stop=None):
    return sandbox.call("shell", {"command": command}, stop)


def py(sandbox, code):
    return sandbox.call("python", {"code": code})


def sleepers():
    """Return the processes of this machine that have the mark."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[:2] == [b"sleep", MARK.encode()]:
            found.append(int(pid))
    return found


def wait_for(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_it_works_in_the_folder(sandbox, folder):
    (folder / "data.txt").write_text("3 4")
    found = sh(sandbox, "cat data.txt; echo five > out.txt; echo tmp > /tmp/x && cat /tmp/x; exit 3")
    assert found.text == "3 4tmp\n\n(exit status 3)"
    assert found.is_error
    assert (folder / "out.txt").read_text() == "five\n"
    found = py(
        sandbox, "import numpy, os; print(sum(map(int, open('data.txt').read().split())), os.getcwd())"
    )
    assert found.text == f"7 {folder}\n"


@pytest.mark.parametrize(
    "command",
    [
        "cat ~/.ssh/id {home}/.ssh/id ../.ssh/id",
        "ln -s ../.ssh/id link; cat link; cp link copy",
        "ln ../.ssh/id hard; cat hard",
        "cat /proc/1/environ; cat /proc/1/root/{home}/.ssh/id; cat /proc/1/cwd/.ssh/id; strings /proc/1/mem",
        "cat /proc/*/environ",
        "env; cat /etc/shadow; cat /root/.bashrc; ls /home /var /run /boot | grep .",
        "find / -xdev -name id -not -path '/usr/*' -not -path '/proc/*' -exec cat {{}} +",
        "chroot {home} cat .ssh/id; unshare -Ur cat {home}/.ssh/id; nsenter -t 1 -m cat {home}/.ssh/id",
    ],
)
def test_reads_nothing_outside(sandbox, folder, command):
    (folder.parent / "secret").write_text("secret")
    found = sh(sandbox, command.format(home=folder.parent))
    assert "secret" not in found.text.replace("secret: No such", "")
    assert "\nroot:" not in f"\n{found.text}"


@pytest.mark.parametrize(
    "command",
    [
        "echo x > {home}/.ssh/id",
        "ln -s {home}/.ssh/id l; echo x > l; truncate -s 0 l",
        "mkdir -p {home}/.ssh; echo x > {home}/.ssh/id",
        "echo x > /usr/bin/edgeinfer-test; touch /etc/edgeinfer-test /edgeinfer-test; chmod 777 /usr",
        "echo x > /proc/sys/kernel/core_pattern; echo 1 > /proc/sys/kernel/sysrq; echo b > /proc/sysrq-trigger",
        "mount -t tmpfs none /usr; mount -o remount,rw /usr; umount /usr; mknod disk b 254 0",
        "mv /tmp /usr/; rename / {home}; rm -rf --no-preserve-root /usr/share/doc/base-files",
    ],
)
def test_writes_nothing_outside(sandbox, folder, command):
    before = os.stat("/usr"), Path("/proc/sys/kernel/core_pattern").read_text()
    sh(sandbox, command.format(home=folder.parent))
    assert (folder.parent / ".ssh" / "id").read_text() == "secret key"
    assert (os.stat("/usr"), Path("/proc/sys/kernel/core_pattern").read_text()) == before
    assert not list(Path("/").glob("*/edgeinfer-test"))
    assert not (folder / "disk").exists()


def test_reaches_no_socket(sandbox, folder):
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as path:
        path.bind(str(folder.parent / "s"))
        path.listen()
        with socket.socket(socket.AF_UNIX) as abstract:
            abstract.bind(f"\0edgeinfer-{os.getpid()}")
            abstract.listen()
            found = py(
                sandbox,
                "import socket as s\n"
                f"for kind, to in (s.AF_INET, {tcp.getsockname()!r}), (s.AF_INET, ('1.1.1.1', 53)), "
                f"(s.AF_UNIX, {path.getsockname()!r}), (s.AF_UNIX, {abstract.getsockname()!r}):\n"
                "    try: s.socket(kind).connect(to); print('connected')\n"
                "    except OSError as e: print(e.strerror)",
            )
    assert len(found.text.splitlines()) == 4
    assert "connected" not in found.text


@pytest.mark.parametrize(
    "call",
    [
        "libc.ptrace(16, 1, 0, 0)",  # PTRACE_ATTACH
        "libc.unshare(0x10000000)",
        "libc.setns(libc.open(b'/proc/1/ns/mnt', 0), 0)",
        "libc.memfd_create(b'm', 0)",
        "libc.socket(40, 1, 0)",  # AF_VSOCK: it is not part of a network namespace
        "libc.shmget(0, 4096, 0o1600)",
        "libc.syscall(250, 0, -3, 0, 0, 0)",  # keyctl
        "libc.setuid(0) if os.getuid() else libc.chroot(b'/usr')",
        "libc.process_vm_readv(1, 0, 0, 0, 0, 0) or -1",
        "libc.init_module(0, 0, 0)",
        "libc.reboot(0x1234567)",
    ],
)
def test_calls_are_refused(sandbox, call):
    code = f"import ctypes, os; libc = ctypes.CDLL(None, use_errno=True); print({call})"
    assert py(sandbox, code).text == "-1\n"


def test_has_no_capability_and_no_open_file(sandbox, folder):
    (folder.parent / "kept").write_text("secret")
    with open(folder.parent / "kept") as kept:
        os.set_inheritable(kept.fileno(), True)
        found = sh(
            sandbox, "grep -E 'Cap(Prm|Eff|Inh|Amb)|NoNewPrivs' /proc/self/status; ls /proc/self/fd"
        )
    rows = dict(line.split(":\t") for line in found.text.splitlines() if ":" in line)
    assert {rows[f"Cap{name}"] for name in ("Prm", "Eff", "Inh", "Amb")} == {"0" * 16}
    assert rows["NoNewPrivs"] == "1"
    assert found.text.splitlines()[-4:] == ["0", "1", "2", "3"]  # the last is the listing's own


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (f"sleep {MARK}", "it took more than 2 s"),
        (f"bomb() {{ bomb | bomb & sleep {MARK}; }}; bomb", "it took more than 2 s|fork"),
        (f"kill -STOP 1; kill -9 1; sleep {MARK}", "it took more than 2 s"),
        ("yes", "it wrote more than 1 MiB"),
        (
            "for n in 1 2 3 4 5 6; do fallocate -l 500M $n; done; sleep 9",
            "the disk lost more than 2 GiB",
        ),
        ("dd if=/dev/zero of=big bs=1M count=600", "File size limit exceeded|File too large|status"),
        ("dd if=/dev/zero of=/tmp/big bs=1M count=600", "No space left"),
    ],
)
def test_limits_end_it(folder, sandbox, command, said):
    found = sh(Sandbox(folder, ("shell",), 2.0), command)
    assert any(words in found.text for words in said.split("|"))
    assert found.is_error
    assert not sleepers()


@pytest.mark.parametrize("processes", [1, 6])
def test_memory_is_limited_over_all_processes(sandbox, processes):
    found = py(
        sandbox,
        f"import os\nfor _ in range({processes} - 1):\n    os.fork() or 0\n    break\n"
        f"pids = [os.fork() for _ in range({processes})] if {processes} > 1 else [0]\n"
        f"if 0 in pids: x = [bytearray(b'x' * (64 << 20)) for _ in range(60 // {processes})]\n"
        "import time; time.sleep(30)",
    )
    assert "more than 2 GiB of memory" in found.text


def test_nothing_outlives_the_call(sandbox, folder):
    found = sh(
        sandbox, f"setsid -f sleep {MARK}; (setsid nohup sleep {MARK} >/dev/null 2>&1 &) ; echo done"
    )
    assert found.text == "done\n"
    assert not sleepers()


def test_stop_ends_it(sandbox):
    stop = Stop()
    caught = []

    def call():
        try:
            sh(sandbox, f"setsid -f sleep {MARK}; sleep {MARK}", stop)
        except Exception as error:
            caught.append(type(error).__name__)

    thread = threading.Thread(target=call)
    thread.start()
    wait_for(lambda: len(sleepers()) == 2)
    stop.set()
    thread.join(30)
    assert caught == ["StoppedError"]
    wait_for(lambda: not sleepers())


def test_ends_with_a_killed_edgeinfer(sandbox, folder):
    code = (
        "from pathlib import Path; from edgeinfer.tools.sandbox import Sandbox; "
        f"Sandbox(Path({str(folder)!r}), ('shell',), 60).call('shell', {{'command': 'sleep {MARK}'}})"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        wait_for(sleepers)
        process.send_signal(signal.SIGKILL)
    wait_for(lambda: not sleepers())


def test_is_not_offered_over_the_home_folder(folder):
    assert "home folder" in Sandbox(folder.parent, ("shell",), 2.0).unavailable()
    assert "home folder" in Sandbox(Path("/"), ("shell",), 2.0).unavailable()


def test_a_home_folder_behind_a_link_is_found(folder, monkeypatch):
    (folder / "link").symlink_to(folder.parent)
    monkeypatch.setenv("HOME", str(folder / "link"))
    assert "home folder" in Sandbox(folder.parent, ("shell",), 2.0).unavailable()


def test_is_not_offered_where_a_command_could_change_edgeinfer(folder, monkeypatch):
    inside = Path(module.__file__).parent
    assert "edgeinfer itself" in Sandbox(inside, ("shell",), 2.0).unavailable()
    monkeypatch.setattr(sys, "prefix", str(folder / ".venv"))
    assert f"({folder}/.venv): install it" in Sandbox(folder, ("shell",), 2.0).unavailable()
    monkeypatch.undo()
    monkeypatch.syspath_prepend(folder / "src")  # of a package that is installed in place
    assert f"({folder}/src): install it" in Sandbox(folder, ("shell",), 2.0).unavailable()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [""])  # python -m edgeinfer
    assert f"({folder}): install it" in Sandbox(folder, ("shell",), 2.0).unavailable()


def test_modules_of_others_in_tmp_are_not_loaded(sandbox):
    assert py(sandbox, "import site; print(site.ENABLE_USER_SITE)").text == "False\n"


@pytest.mark.usefixtures("sandbox")
def test_an_interpreter_behind_a_link_is_found(folder, monkeypatch):
    real, link = folder.parent / "python-3.11.2", folder.parent / "python-3.11"
    real.mkdir()
    (real / "lib").write_text("found")
    link.symlink_to(real)
    monkeypatch.setattr(sys, "base_prefix", str(link))
    assert sh(Sandbox(folder, ("shell",), 20.0), f"cat {link}/lib").text == "found"
