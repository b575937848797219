"""Commands that try to escape from the sandbox, to exhaust the machine, or to outlive the call."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from other_processes import wait_until

from edgeinfer.tools import sandbox as module
from edgeinfer.tools.sandbox import Sandbox
from edgeinfer.tools.tool_use import Stop, StoppedError

pytestmark = pytest.mark.slow  # starts programs
MARK = "86399.5"  # an argument of `sleep` that identifies the test's processes


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
def patient(folder):
    """Return a sandbox with a long time limit, so that another limit is exceeded first."""
    sandbox = Sandbox(folder, ("shell", "python"), 300.0)
    if reason := sandbox.unavailable():
        pytest.skip(f"no sandbox: {reason}")
    return sandbox


@pytest.fixture
def sandbox(folder, patient):
    return Sandbox(folder, ("shell", "python"), 20.0)


def sh(sandbox, command, stop=None):
    return sandbox.call("shell", {"command": command}, stop)


def py(sandbox, code):
    return sandbox.call("python", {"code": code})


def stop_once(condition, what):
    """Return a `Stop` that is set once `condition()` is true."""
    stop = Stop()

    def wait_and_stop():
        wait_until(condition, what)
        stop.set()

    threading.Thread(target=wait_and_stop).start()
    return stop


def sleepers():
    """Return the PIDs of processes with `MARK` in their arguments."""
    pids = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if arguments[:2] == [b"sleep", MARK.encode()]:
            pids.append(int(pid))
    return pids


def test_commands_and_python_work_in_the_folder(sandbox, folder):
    (folder / "data.txt").write_text("3 4")
    result = sh(sandbox, "cat data.txt; echo five > out.txt; echo tmp > /tmp/x && cat /tmp/x; exit 3")
    assert result.text == "3 4tmp\n\n(exit status 3)"
    assert result.is_error
    assert (folder / "out.txt").read_text() == "five\n"
    total = "sum(map(int, open('data.txt').read().split()))"
    result = py(sandbox, f"import numpy, os; print({total}, os.getcwd())")
    assert result.text == f"7 {folder}\n"


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
def test_a_command_reads_nothing_outside(sandbox, folder, command):
    (folder.parent / "secret").write_text("secret")
    result = sh(sandbox, command.format(home=folder.parent))
    assert "secret" not in result.text.replace("secret: No such", "")
    assert "\nroot:" not in f"\n{result.text}"


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
def test_a_command_writes_nothing_outside(sandbox, folder, command):
    before = os.stat("/usr"), Path("/proc/sys/kernel/core_pattern").read_text()
    sh(sandbox, command.format(home=folder.parent))
    assert (folder.parent / ".ssh" / "id").read_text() == "secret key"
    assert (os.stat("/usr"), Path("/proc/sys/kernel/core_pattern").read_text()) == before
    assert not list(Path("/").glob("*/edgeinfer-test"))
    assert not (folder / "disk").exists()


def test_a_command_reaches_no_socket(sandbox, folder):
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as path:
        path.bind(str(folder.parent / "s"))
        path.listen()
        with socket.socket(socket.AF_UNIX) as abstract:
            abstract.bind(f"\0edgeinfer-{os.getpid()}")
            abstract.listen()
            result = py(
                sandbox,
                "import socket as s\n"
                f"for kind, to in (s.AF_INET, {tcp.getsockname()!r}), (s.AF_INET, ('1.1.1.1', 53)), "
                f"(s.AF_UNIX, {path.getsockname()!r}), (s.AF_UNIX, {abstract.getsockname()!r}):\n"
                "    try: s.socket(kind).connect(to); print('connected')\n"
                "    except OSError as e: print(e.strerror)",
            )
    assert len(result.text.splitlines()) == 4
    assert "connected" not in result.text


@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_DGRAM", "SOCK_SEQPACKET"])
def test_a_command_reaches_no_program_that_listens_in_the_folder(sandbox, folder, kind):
    with socket.socket(socket.AF_UNIX, getattr(socket, kind)) as agent:
        agent.bind(str(folder / "agent.sock"))
        if kind != "SOCK_DGRAM":
            agent.listen()
        agent.setblocking(False)
        tried = py(
            sandbox,
            "import socket as s\n"
            f"def own(): return s.socket(s.AF_UNIX, s.{kind})\n"
            f"def pair(kind): return lambda: s.socketpair(s.AF_UNIX, kind)[0]\n"
            "makes = [own, *map(pair, (1, 2, 3, 5, 2 | s.SOCK_CLOEXEC))]\n"
            "for make in makes:\n"
            "  for name in 'agent.sock', './agent.sock':\n"
            "    for use in (lambda x: x.connect(name), lambda x: x.sendto(b'x', name)):\n"
            "      try: use(make()); print('reached')\n"
            "      except OSError as e: print(e.strerror)\n"
            "a, b = s.socketpair(); a.send(b'ok'); print(b.recv(2))",
        )
        assert "reached" not in tried.text
        assert tried.text.endswith("b'ok'\n")
        with pytest.raises(BlockingIOError):
            agent.recv(1) if kind == "SOCK_DGRAM" else agent.accept()


@pytest.fixture
def self_running_files(folder):
    """Return the folder, with files that other programs execute by themselves."""
    (folder / ".git" / "hooks").mkdir(parents=True)
    (folder / ".git" / "config").write_text("[core]\n")
    (folder / "settings").mkdir()
    (folder / "settings" / "tasks.json").write_text("{}")
    (folder / ".vscode").symlink_to("settings")
    (folder / ".mcp.json").write_text("{}")
    return folder


def tree(folder):
    return {
        str(path.relative_to(folder)): path.read_text() if path.is_file() else os.readlink(path)
        for path in folder.rglob("*")
        if path.is_file() or path.is_symlink()
    }


@pytest.mark.parametrize(
    "command",
    [
        "echo x > .git/hooks/pre-commit; echo x >> .git/config; rm .git/config",
        "mv .git old; mkdir .git; echo x > .git/config",
        "rm -rf .git; cp -r .git new; mv new .git",
        "ln .git/config here && echo x > here; ln -s .git/config there; echo x > there",
        "chmod 777 .git/config; mkdir -p .git/hooks/x; umount .git; mount -o remount,rw .git",
        "echo x > .mcp.json; mv .mcp.json old; echo x > new; mv new .mcp.json",
        "echo x > .vscode/tasks.json; echo x > settings/tasks.json; mv settings old",
        "python3 -c \"import os; os.open('.git', os.O_PATH); os.rename('.git', 'x')\"",
    ],
)
def test_self_running_files_are_read_only(sandbox, self_running_files, command):
    before = tree(self_running_files)
    sh(sandbox, command)
    after = tree(self_running_files)
    assert {name: after.get(name) for name in before} == before
    assert not [name for name in after if name.startswith(".") and name not in before]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("echo x > .envrc", ".envrc"),
        ("mkdir -p .idea; echo x > .idea/x; sleep 9", ".idea"),
        ("(sleep 0.2; mkdir .husky; echo x > .husky/pre-commit; sleep 9) & sleep 0.5; echo", ".husky"),
        ("setsid -f sh -c 'while :; do echo x > .envrc; done' & sleep 9", ".envrc"),
        ("ln -s settings v; mv -T v .vscode; sleep 9", ".vscode"),
        ("ln -s settings .claude; sleep 9", ".claude"),
    ],
)
def test_new_self_running_files_are_renamed(sandbox, self_running_files, command, name):
    said = sh(sandbox, command)
    assert f"{name} would be executed by other programs; renamed to *.from-sandbox-" in said.text
    assert said.is_error
    assert not os.path.lexists(self_running_files / name)
    assert len(list(self_running_files.glob(f"{name}.from-sandbox-*"))) == 1


def test_a_removed_self_running_file_is_reported(sandbox, self_running_files):
    said = sh(sandbox, "rm .vscode; sleep 9")
    assert ".vscode was removed" in said.text
    assert said.is_error


@pytest.mark.parametrize(
    "command",
    [
        "echo x > sub/.envrc; rm -f sub/.envrc; mv sub/.envrc y; echo x | tee sub/.envrc",
        "echo x > sub/deep/.git/hooks/pre-commit; mv sub/deep/.git z; rm -rf sub/deep",
        "rm -rf bare/hooks; mv bare/HEAD b; echo x >> bare/config; echo x > bare/hooks/post-update",
        "mv sub moved; echo x > moved/.envrc; mv moved sub",
        "ln -f sub/data sub/.envrc; echo x > conf/real; rm -rf conf",
    ],
)
def test_self_running_files_in_subfolders_are_read_only(sandbox, folder, command):
    contents = {
        "sub/.envrc": "mine",
        "sub/data": "data",
        "sub/deep/.git/hooks/pre-commit": "mine",
        "bare/HEAD": "ref: refs/heads/main",
        "bare/config": "[core]",
        "bare/hooks/post-update": "mine",
        "conf/real": "mine",
    }
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name in ("bare/objects", "bare/refs", "linked"):
        (folder / name).mkdir()
    (folder / "linked" / ".envrc").symlink_to("../conf/real")
    sh(sandbox, command)
    assert {name: (folder / name).read_text() for name in contents} == contents
    assert not list(folder.rglob("*.from-sandbox-*"))


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("mkdir -p a/b; echo x > a/b/.envrc", "a/b/.envrc"),
        ("mkdir -p a; git init -q a || mkdir a/.git", "a/.git"),
        ("mkdir -p r/objects r/refs; echo x > r/HEAD", "r/HEAD"),
        ("mkdir r; echo ../common > r/commondir; echo x > r/HEAD", "r/HEAD"),
        ("mkdir -p a; ln -s ../sub/data a/.exrc", "a/.exrc"),
        ("mv sub old; mkdir sub; echo x > sub/.envrc", "sub/.envrc"),
        ("mkdir a; echo x > a/.envrc; chmod 111 a", "a/.envrc"),
        ("mkdir -p a z/z; echo x > z/z/.envrc; cd a; seq 2000 | xargs touch", "z/z/.envrc"),
    ],
)
def test_new_self_running_files_in_subfolders_are_renamed(sandbox, folder, command, path, monkeypatch):
    monkeypatch.setattr("edgeinfer.tools.self_running.MAX_NAMES", 100)
    (folder / "sub").mkdir()
    (folder / "sub" / ".envrc").write_text("mine")
    result = sh(sandbox, command)
    assert result.is_error
    assert f"{path} would be executed by other programs" in result.text
    assert not os.path.lexists(folder / path)
    assert list((folder / path).parent.glob(f"{(folder / path).name}.from-sandbox-*"))
    moved = folder / ("old" if command.startswith("mv") else "sub")
    assert (moved / ".envrc").read_text() == "mine", "it was there before, in a folder that was moved"


def test_files_of_a_huge_tree_that_were_not_searched_are_not_renamed(sandbox, folder, monkeypatch):
    (folder / "sub" / "deep").mkdir(parents=True)
    (folder / "sub" / "deep" / ".envrc").write_text("mine")
    file = folder / "sub" / "deep" / ".envrc"
    wait_until(lambda: file.stat().st_ctime < time.time() - 0.1, "the file to be old")
    monkeypatch.setattr("edgeinfer.tools.self_running.MAX_NAMES", 1)
    result = sh(sandbox, "mkdir new; echo x > new/.envrc")
    assert "new/.envrc would be executed" in result.text
    assert (folder / "sub" / "deep" / ".envrc").read_text() == "mine"


@pytest.mark.parametrize("name", [".git", "HEAD", ".envrc"])
@pytest.mark.parametrize("ending", ["output", "stop", "closed output", "folder without permissions"])
def test_new_self_running_files_are_renamed_however_the_call_ends(sandbox, folder, name, ending):
    make = f"mkdir {name}; echo x > {name}/config"
    stop = stop_once((folder / "go").exists, "the command to run") if ending == "stop" else Stop()
    says = {
        "output": f"head -c 1048570 /dev/zero; {make}; yes",
        "stop": f"touch go; while :; do {make}; done 2>/dev/null",
        "closed output": f"exec >/dev/null 2>&1; {make}; exit 0",
        "folder without permissions": f"{make}; chmod 0 .",
    }
    with contextlib.suppress(StoppedError):
        sh(sandbox, says[ending], stop)
    assert not os.path.lexists(folder / name)
    assert stop.is_set or list(folder.glob(f"{name}.from-sandbox-*"))


def test_new_self_running_files_are_renamed_after_edgeinfer_was_killed(sandbox, folder):
    command = f"touch go; while :; do mkdir .git; done 2>/dev/null & exec sleep {MARK}"
    code = (
        "from pathlib import Path; from edgeinfer.tools import sandbox_process, sandbox; "
        f"box = sandbox.Sandbox(Path({str(folder)!r}), ('shell',), 60); "
        f"box.call('shell', {{'command': {command!r}}})"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        wait_until((folder / "go").exists, "the command to run")
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not sleepers() and not (folder / ".git").exists(), "the end of the command")
    time.sleep(0.2)
    assert not (folder / ".git").exists()


@pytest.mark.parametrize(
    ("files", "command", "unchanged"),
    [
        ({".git -> meta/git": "", "meta/git/config": "mine"}, "mv meta old; mkdir -p meta/git", ".git"),
        (
            {".git": "gitdir: meta/git", "meta/git/config": "mine"},
            "mv meta a; mkdir -p meta/git",
            ".git",
        ),
        ({".envrc -> conf/envrc": "", "conf/envrc": "mine"}, "mv conf a; mkdir conf", ".envrc"),
    ],
)
def test_the_target_of_a_link_cannot_be_exchanged(sandbox, folder, files, command, unchanged):
    for name, content in files.items():
        link, _, target = name.partition(" -> ")
        (folder / link).parent.mkdir(parents=True, exist_ok=True)
        if target:
            (folder / link).symlink_to(target)
        else:
            (folder / link).write_text(content)
    last = list(files)[-1]
    said = sh(sandbox, f"echo evil > {last}; {command}; echo evil > {last}; sleep 9")
    assert "renamed to *.from-sandbox-" in said.text
    assert not os.path.lexists(folder / unchanged)
    assert "mine" in {path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_bare_repository_is_read_only(sandbox, folder):
    for name in "objects", "refs":
        (folder / name).mkdir()
    (folder / "HEAD").write_text("ref: refs/heads/main\n")
    (folder / "config").write_text("[core]\n\tbare = true\n")
    sh(sandbox, "echo x >> config; echo x > HEAD; rm config; mkdir hooks")
    assert (folder / "config").read_text() == "[core]\n\tbare = true\n"
    assert not (folder / "hooks").exists()


@pytest.mark.parametrize(
    "command",
    [
        "cp /bin/sh sg; chmod {0} sg",
        "python3 -c 'import os; os.open(\"sg\", os.O_CREAT | os.O_WRONLY, 0o{0})'",
        "python3 -c 'import os; os.mknod(\"sg\", 0o10{0})'",
        "python3 -c 'import os; os.fchmod(os.open(\"sg\", os.O_CREAT | os.O_WRONLY), 0o{0})'",
        "install -m {0} /bin/sh sg",
        "python3 -c 'import ctypes; ctypes.CDLL(None).syscall(452, -100, b\"sg\", 0o{0}, 0)'",
        "mkdir -m {0} sg",
    ],
)
@pytest.mark.parametrize("mode", ["4755", "2755", "6711"])
def test_a_command_sets_no_setuid_bit(sandbox, folder, command, mode):
    sh(sandbox, command.format(mode))
    modes = [path.stat().st_mode for path in folder.iterdir()]
    assert not [mode for mode in modes if mode & 0o6000]
    assert sh(sandbox, "touch a; chmod 1755 a; mkdir -m 1777 b; chmod 600 a").text == ""


def test_the_permissions_of_the_folder_come_back(sandbox, folder):
    folder.chmod(0o750)
    sh(sandbox, "chmod 777 .")
    assert folder.stat().st_mode & 0o7777 == 0o750


def test_sockets_take_little_memory(patient):
    """Buffers of sockets do not count as memory of a process."""
    tried = py(
        patient,
        "import socket as s\na, b = s.socketpair()\n"
        "for option in s.SO_SNDBUF, s.SO_RCVBUF, 32, 33:\n"
        "  try: a.setsockopt(s.SOL_SOCKET, option, 1 << 20); print('set')\n"
        "  except OSError as e: print(e.errno)\n"
        "a.setsockopt(s.SOL_SOCKET, s.SO_KEEPALIVE, 1); a.setsockopt(s.SOL_SOCKET, s.SO_PASSCRED, 0)",
    )
    assert tried.text == "1\n1\n1\n1\n"
    tried = py(
        patient,
        "import os, socket, time\n"
        "for _ in range(40): \n    if not os.fork(): break\n"
        "pairs = [socket.socketpair() for _ in range(60)]\ntime.sleep(300)",
    )
    assert "more than 2,048 sockets" in tried.text


def test_a_program_of_the_folder_is_not_found_by_others(sandbox, folder, monkeypatch):
    monkeypatch.setenv("PATH", f"{folder}/.venv/bin:.:/usr/bin:{folder}/../project:/bin")
    assert sandbox.unavailable() == ""
    assert os.environ["PATH"] == "/usr/bin:/bin"
    assert Sandbox(Path("/"), ("shell",), 2.0).unavailable()
    assert os.environ["PATH"] == "/usr/bin:/bin"  # unchanged, because no command runs in /


def test_the_command_is_not_an_argument_of_a_process(sandbox, folder):
    """Other users could read it in the list of processes."""
    seen = []

    def look():
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                seen.append(Path(f"/proc/{pid}/cmdline").read_bytes())

    for name, code in [
        ("shell", "password=hun''ter2; touch ready; while [ -e ready ]; do sleep 0.01; done"),
        ("python", "import os\nopen('ready', 'w')\nwhile os.path.exists('ready'): pass #hun''ter2"),
    ]:
        arguments = {"command" if name == "shell" else "code": code}
        thread = threading.Thread(target=sandbox.call, args=(name, arguments))
        thread.start()
        wait_until((folder / "ready").exists, "the command to run")
        look()
        (folder / "ready").unlink()
        thread.join(60)
    assert any(b"/command" in line for line in seen)
    assert not any(b"ter2" in line for line in seen)


def test_a_command_may_be_long_and_its_input_is_empty(sandbox, folder):
    long = f"text = {'x' * 300_000!r}\nprint(len(text), input.__name__)"
    assert py(sandbox, long).text == "300000 input\n"
    assert sh(sandbox, "cat; echo $0 $#").text == "/command 0\n"
    (folder / "local.py").write_text("value = 7")
    assert py(sandbox, "import local; print(local.value, __name__)").text == "7 __main__\n"
    assert "line 2" in py(sandbox, "a = 1\nraise ValueError").text


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
def test_dangerous_system_calls_are_refused(sandbox, call):
    code = f"import ctypes, os; libc = ctypes.CDLL(None, use_errno=True); print({call})"
    assert py(sandbox, code).text == "-1\n"


def test_has_no_capability_and_no_open_file(sandbox, folder):
    (folder.parent / "kept").write_text("secret")
    with open(folder.parent / "kept") as file:
        os.set_inheritable(file.fileno(), True)
        grep = "grep -E 'Cap(Prm|Eff|Inh|Amb)|NoNewPrivs' /proc/self/status"
        result = sh(sandbox, f"{grep}; ls /proc/self/fd")
    rows = dict(line.split(":\t") for line in result.text.splitlines() if ":" in line)
    assert {rows[f"Cap{name}"] for name in ("Prm", "Eff", "Inh", "Amb")} == {"0" * 16}
    assert rows["NoNewPrivs"] == "1"
    assert result.text.splitlines()[-4:] == ["0", "1", "2", "3"]  # descriptor 3 is that of `ls` itself


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (f"sleep {MARK}", "took more than 2 s"),
        (f"bomb() {{ bomb | bomb & sleep {MARK}; }}; bomb", "took more than 2 s|fork"),
        (f"kill -STOP 1; kill -9 1; sleep {MARK}", "took more than 2 s"),
        ("yes", "the command wrote more than 1 MiB"),
        (
            "for n in 1 2 3 4 5 6; do fallocate -l 500M $n; done; sleep 300",
            "free disk space fell by more than 2 GiB",
        ),
        ("dd if=/dev/zero of=big bs=1M count=600", "File size limit exceeded|File too large|status"),
        ("dd if=/dev/zero of=/tmp/big bs=1M count=600", "No space left"),
    ],
)
def test_a_command_beyond_a_limit_is_ended(folder, sandbox, command, said):
    timeout_s = 2.0 if "more than 2 s" in said else 300.0
    result = sh(Sandbox(folder, ("shell",), timeout_s), command)
    assert any(text in result.text for text in said.split("|"))
    assert result.is_error
    assert not sleepers()


@pytest.mark.parametrize("processes", [1, 6])
def test_memory_is_limited_over_all_processes(patient, processes):
    result = py(
        patient,
        f"import os\nfor _ in range({processes} - 1):\n    os.fork() or 0\n    break\n"
        f"pids = [os.fork() for _ in range({processes})] if {processes} > 1 else [0]\n"
        f"if 0 in pids: x = [bytearray(b'x' * (64 << 20)) for _ in range(60 // {processes})]\n"
        "import time; time.sleep(300)",
    )
    assert "more than 2 GiB of memory" in result.text


@pytest.mark.needs("time")
@pytest.mark.parametrize(
    ("after", "said"),
    [
        ("", "more than 2 GiB of memory"),
        ("m.madvise(mmap.MADV_DONTNEED)", "shared memory grew by more than 2 GiB"),
        (
            "libc.munmap(ctypes.c_void_p(start + 4096), ctypes.c_size_t(len(m) - 4096))",
            "shared memory grew",
        ),
    ],
)
def test_shared_memory_is_limited(patient, after, said):
    """Even if no process maps it any more."""
    text = py(
        patient,
        "import ctypes, mmap, time\nlibc, kept = ctypes.CDLL(None), []\n"
        "for _ in range(7):\n"
        "    m = mmap.mmap(-1, 512 << 20)\n"
        "    start = ctypes.addressof(ctypes.c_char.from_buffer(m))\n"
        "    ctypes.memset(start, 1, len(m))\n"
        f"    {after}\n"
        "    kept.append(m)\n"
        "time.sleep(300); print('held')",
    ).text
    assert said in text or (after and "more than 2 GiB of memory" in text)
    assert "held" not in text


@pytest.mark.needs("time")
def test_the_number_of_files_is_limited(patient, folder):
    if not os.statvfs(folder).f_files:
        pytest.skip("this filesystem has no limit of files")
    code = "import os\nfor n in range(10**9):\n    os.close(os.open(f'{n}', os.O_CREAT))"
    assert "more than 100,000 files were created" in py(patient, code).text
    assert len(os.listdir(folder)) < 200_000


def test_nothing_outlives_the_call(sandbox, folder):
    sleep = f"sleep {MARK}"
    result = sh(sandbox, f"setsid -f {sleep}; (setsid nohup {sleep} >/dev/null 2>&1 &) ; echo done")
    assert result.text == "done\n"
    assert not sleepers()


def test_a_stop_ends_a_command(sandbox):
    stop = stop_once(lambda: len(sleepers()) == 2, "two processes")
    with pytest.raises(StoppedError):
        sh(sandbox, f"setsid -f sleep {MARK}; sleep {MARK}", stop)
    wait_until(lambda: not sleepers(), "their end")


def test_is_not_offered_over_the_home_folder(folder, monkeypatch):
    assert "home folder" in Sandbox(Path("/"), ("shell",), 2.0).unavailable()
    (folder / "link").symlink_to(folder.parent)
    for home in folder.parent, folder / "link":
        monkeypatch.setenv("HOME", str(home))
        assert "home folder" in Sandbox(folder.parent, ("shell",), 2.0).unavailable()


def test_is_not_offered_where_a_command_could_change_edgeinfer(folder, monkeypatch):
    inside = Path(module.__file__).parent
    assert "edgeinfer itself" in Sandbox(inside, ("shell",), 2.0).unavailable()
    monkeypatch.setattr(sys, "prefix", str(folder / ".venv"))
    assert f"({folder}/.venv): install edgeinfer" in Sandbox(folder, ("shell",), 2.0).unavailable()
    monkeypatch.undo()
    monkeypatch.syspath_prepend(folder / "src")  # an editable install puts this folder on sys.path
    assert f"({folder}/src): install edgeinfer" in Sandbox(folder, ("shell",), 2.0).unavailable()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [""])  # as `python -m edgeinfer` does
    assert f"({folder}): install edgeinfer" in Sandbox(folder, ("shell",), 2.0).unavailable()


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


def test_a_folder_of_another_user_can_be_worked_in():
    sandbox = Sandbox(Path("/usr"), ["shell"], 20.0)
    assert sandbox.missing_support() == ""
