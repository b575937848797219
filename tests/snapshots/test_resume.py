"""The real model is resumed by an ordinary user and by root; no snapshot has a user's data."""

import json
import os
import select
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from other_processes import command_name, descendants, has_ended, private_bytes, wait_until

from .conftest import MODEL, NO_AUTO_WARM

pytestmark = pytest.mark.criu

SECRET = "planted-4f1d9a7c"

SLOW_EXIT = """
#include <unistd.h>
__attribute__((destructor)) static void wait_a_little(void) { usleep(60000); }
"""
SLOW_CRIU = """
import os, sys
library, execve = sys.argv.pop(1), os.execve
os.execve = lambda path, argv, env: execve(path, argv, env | {"LD_PRELOAD": library})
from edgeinfer.launcher import main
sys.exit(main())
"""


def facts(person) -> dict:
    return json.loads(person.ask_resumed("facts"))


def test_a_warm_model_is_resumed_and_answers_as_a_cold_one_does(warm):
    resumed, cold = warm.ask(), warm.ask("--resume=never")
    assert resumed.start["how"] == "resumed"
    assert cold.start["how"] == "cold"
    assert resumed.result["text"] == cold.result["text"] != ""
    assert resumed.err == ""
    for outcome in (resumed, cold):
        stages = outcome.start["stages_ms"]
        assert list(stages) == ["launcher", "restore", "running", "request", "load", "ready"]
        assert list(stages.values()) == sorted(stages.values())
        assert outcome.result["startup"]["ready_ms"] == stages["ready"]


@pytest.mark.parametrize("typed", [MODEL.upper(), MODEL.title(), f"{MODEL}:"])
def test_a_warm_model_is_resumed_however_it_is_spelled(warm, typed):
    if typed.endswith(":"):
        record = json.loads((warm.data / f"data/models/{MODEL}/model.json").read_text())
        typed += record["quantization"].lower()
    outcome = warm.run("run", typed, "Hi", "--max-tokens", "2", "--json", timeout=60)
    assert outcome.start["how"] == "resumed"


@pytest.mark.parametrize("to_folder", [False, True])
def test_a_link_that_leads_to_another_file_is_not_resumed(user, smollm2, to_folder):
    folders = [user.home / "first", user.home / "second"]
    for folder in folders:
        folder.mkdir()
        shutil.copy(smollm2, folder / "m.gguf")
    link = user.home / "link"
    typed = str(link / "m.gguf") if to_folder else f"{link}.gguf"
    user.settings(NO_AUTO_WARM)
    for folder, how in zip(folders, ("resumed", "cold"), strict=True):
        link, target = (link, folder) if to_folder else (Path(typed), folder / "m.gguf")
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        if how == "resumed":
            user.run("warm", typed, "--quiet").check()
        outcome = user.run("run", typed, "Hi", "--max-tokens", "2", "--json")
        assert outcome.start["how"] == how
    assert "was changed" in outcome.start["reason"]


def test_a_resumed_process_has_the_sandbox(warm):
    """Check root too, which needs a capability to create a user namespace."""
    warm.settings(f'{NO_AUTO_WARM}[tools]\nbuiltin = ["shell"]\n')
    project = warm.home / "project"
    project.mkdir()
    os.chown(project, warm.uid, warm.gid)
    try:
        outcome = warm.ask("--tools", "--resume=always", cwd=project)
    finally:
        warm.settings(NO_AUTO_WARM)
    assert outcome.start["how"] == "resumed"
    assert "not available" not in outcome.err


def test_cold_start_reports_reason_and_fix_in_one_line(warm):
    outcome = warm.ask("--ctx", "512")
    assert outcome.start["how"] == "cold"
    assert outcome.err.count("\n") == 1
    assert "no snapshot with --ctx 512" in outcome.err
    assert "edgeinfer warm" in outcome.err
    refused = warm.ask("--ctx", "512", "--resume=always")
    assert (refused.code, "hint:" in refused.err) == (7, True)


def test_restored_processes_draw_different_randomness(warm):
    first, second = facts(warm)["random"], facts(warm)["random"]
    assert set(first) >= {"os.urandom", "secrets", "uuid4", "random", "ssl", "sampler", "tempfile"}
    assert [name for name in first if first[name] == second[name]] == []


ENVIRONMENT = """
send = checks.messages.send
def send_with_environment(link, request):
    request.env = ("HOME=/nowhere", "TZ=Asia/Tokyo", "LANG=C.UTF-8", "ONLY=this")
    request.cwd, request.umask, request.affinity = "/usr", 0o027, ("0",)
    request.limits = {"RLIMIT_NOFILE": "200"}
    send(link, request)
checks.messages.send = send_with_environment
"""


def test_launch_request_sets_the_process_environment(warm):
    result = json.loads(warm.ask_resumed("facts", before=ENVIRONMENT))
    environment = {"HOME": "/nowhere", "TZ": "Asia/Tokyo", "LANG": "C.UTF-8", "ONLY": "this"}
    assert result["environment"] == environment
    assert (result["cwd"], result["umask"], result["timezone"]) == ("/usr", 0o027, "JST")
    assert result["affinity"] == [0]
    assert result["nofile"] == 200


def test_a_resumed_process_is_not_niced_like_its_builder(warm):
    assert facts(warm)["nice"] <= os.getpriority(os.PRIO_PROCESS, 0)


def test_modules_of_launch_verbs_are_imported_before_the_dump(warm):
    needed = """
        textual.app textual.drivers.linux_driver textual.widgets._markdown textual.widgets._text_area
        uvicorn.server uvicorn.protocols.http.httptools_impl llama_cpp edgeinfer.cli.main
    """.split()
    assert set(needed) <= set(facts(warm)["modules"])
    trace = warm.home / "imported"
    warm.ask(env={"EDGEINFER_TRACE_IMPORTS": str(trace)}).check()
    assert trace.read_text().split() == []


def test_a_parked_process_is_one_thread(warm):
    """Count threads, because each costs time at every restore."""
    cores = warm.snapshot(MODEL).glob("images/core-*.img")
    assert len(list(cores)) == 1


def test_image_holds_no_user_data(warm):
    plant = {"OPENAI_API_KEY": SECRET, "EDGEINFER_API_KEY": SECRET, "SOMETHING": SECRET}
    warm.run("warm", MODEL, "--ctx", "1024", "--quiet", env=plant, cwd=warm.home).check()
    folder = warm.snapshot(f"{MODEL},ctx=1024")
    searched = [path for path in folder.rglob("*") if path.is_file()]
    assert {"memory.img", "pages-1.img"} <= {path.name for path in searched}
    for path in searched:
        content = path.read_bytes()
        assert SECRET.encode() not in content, path
        assert SECRET.encode("utf-16-le") not in content, path
        assert f"HOME={warm.home}".encode() not in content, path
    warm.run("snapshots", "rm", f"{MODEL},ctx=1024").check()


def test_files_and_folders_are_this_users_alone(warm):
    for path in (warm.snapshots, *warm.snapshots.rglob("*")):
        info = path.lstat()
        assert info.st_uid == warm.uid, path
        assert info.st_mode & 0o077 == 0, path


def test_list_shows_both_sizes_and_the_state(warm):
    by_name = {s["details"]["name"]: s for s in warm.run("snapshots", "--json").result["snapshots"]}
    listed, details = by_name[MODEL], by_name[MODEL]["details"]
    assert (listed["fresh"], listed["state"]) == (True, "ready")
    assert 0 < listed["disk_bytes"] < details["memory_bytes"] + details["images_bytes"]


def test_sixteen_at_once_from_one_snapshot(warm):
    command = ("run", MODEL, "Hello", "--max-tokens", "1", "--json")
    crowd = [warm.popen(*command) for _ in range(16)]
    for process in crowd:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        assert json.loads(out)["result"]["start"]["how"] == "resumed"


@pytest.mark.parametrize(
    "options", [("--max-tokens", "100"), ("--max-tokens", "1")], ids=["outlives CRIU", "ends before"]
)
def test_a_criu_that_ends_late_takes_nothing_with_it(warm, tmp_path_factory, options):
    folder = tmp_path_factory.mktemp("slow")
    (folder / "slow.c").write_text(SLOW_EXIT)
    library = folder / "slow.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "slow.c"], check=True)
    shutil.copy(library, warm.home / "slow.so")
    ask = ("run", MODEL, "Count to fifty.", *options, "--temperature", "0", "--json")
    late = warm.run(str(warm.home / "slow.so"), *ask, "--resume=always", program=SLOW_CRIU).check()
    assert late.result["text"] == warm.run(*ask, "--resume=always").check().result["text"] != ""
    assert late.start["how"] == "resumed"


def test_exit_codes_are_the_apps(warm):
    assert warm.run("run", MODEL, "").code == 2
    assert warm.run("run", MODEL, "x", "--no-such-option").code == 2


def counting(person) -> subprocess.Popen:
    """Start a long answer; return once it has begun."""
    counting = ", ".join(map(str, range(1, 30)))  # the model continues to count
    process = person.popen("run", MODEL, counting, *"--raw --temperature 0 --max-tokens 100000".split())
    assert select.select([process.stdout], [], [], 60)[0]
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_app_and_its_answer_comes_back(warm, number):
    process = counting(warm)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 130


def test_killing_the_launcher_ends_the_app(warm):
    process = counting(warm)
    below = descendants(process.pid)
    assert len(below) == 2
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: all(map(has_ended, below)), "both to end")


def test_the_launcher_reports_an_app_that_was_killed(warm):
    process = counting(warm)
    os.kill(descendants(process.pid)[-1], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert "killed by signal 9" in err


def test_an_app_that_stops_stops_its_launcher_and_both_go_on(warm):
    process = counting(warm)
    os.kill(process.pid, signal.SIGTSTP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    os.kill(process.pid, signal.SIGCONT)
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130


def test_an_idle_resumed_process_has_little_memory_of_its_own(warm):
    process = warm.popen("run", MODEL, "--max-tokens", "4", stdin=subprocess.PIPE)

    def private() -> int:
        return sum(private_bytes(pid) for pid in (process.pid, *_wait_for_app(process)))

    # memory falls once the process is idle, shortly after its restore
    wait_until(lambda: private() < 80_000_000, "little memory")
    out, err = process.communicate("Hello", timeout=60)
    assert process.returncode == 0, (out, err)
    assert out.strip()


def _wait_for_app(process) -> list[int]:
    while True:
        assert process.poll() is None, process.communicate()
        processes = descendants(process.pid)
        if len(processes) == 2 and command_name(processes[1]) == "edgeinfer":
            return processes
