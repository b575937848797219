"""Parts of snapshots: builds, stamps, random seeds, prefetch, limits, what a launch imports."""

import contextlib
import ctypes
import json
import mmap
import os
import random
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from fake_engine import FakeEngine
from made_models import make_llama
from other_processes import run, run_python, wait_until

from edgeinfer.cli.main import main
from edgeinfer.cli.verbs import doctor
from edgeinfer.cli.verbs.snapshots import SnapshotsResult
from edgeinfer.config.config_file import SnapshotsConfig
from edgeinfer.config.load_options import snapshot_options
from edgeinfer.errors import (
    DiskFullError,
    DumpError,
    SnapshotMissingError,
    SnapshotStaleError,
    SnapshotUnsafeError,
)
from edgeinfer.host import ProcessStart
from edgeinfer.launcher import builds, launch, messages, selection, supervise
from edgeinfer.launcher.apps import Apps
from edgeinfer.launcher.argv import CommandLine
from edgeinfer.launcher.messages import LaunchRequest
from edgeinfer.platform import paths
from edgeinfer.platform.disk import free_bytes, locked
from edgeinfer.runtime.llama.mappings import Area
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.snapshot_format import criu, fingerprint, storage
from edgeinfer.snapshots import registry
from edgeinfer.snapshots.builder import jobs
from edgeinfer.snapshots.builder.builder import Builder, BuildRequest
from edgeinfer.snapshots.inputs import SnapshotInputs
from edgeinfer.snapshots.restore import app_process, loaded_model
from edgeinfer.snapshots.restore.app_host import AppHost
from edgeinfer.workers.remote_engine import RemoteEngine

from ..conftest import ROOT
from .conftest import NO_AUTO_WARM, folder_of, manifest, publish

# --- building and removing


def test_death_of_the_process_to_park_is_reported_with_its_last_lines(tmp_path):
    (tmp_path / storage.PARK_LOG).write_text("Traceback\nValueError: no\n")
    inputs = SnapshotInputs(model="m", files=ModelFiles(name="m", paths=()), options=LoadOptions())
    request = BuildRequest(inputs=inputs, depends_on="", criu="", version="", tier="root")
    with contextlib.ExitStack() as sockets:
        (client, _), (link, parked), (init, builder) = (
            [sockets.enter_context(link) for link in socket.socketpair()] for _ in range(3)
        )
        parked.shutdown(socket.SHUT_WR)
        builder.sendall(b"256")
        with pytest.raises(DumpError, match=r"died: Traceback \| ValueError: no$") as caught:
            Builder(client, tmp_path, request)._wait_until_parked(link, init)
    assert caught.value.hint is None


@pytest.mark.parametrize("verb", [["warm", "m"], ["snapshots", "take"]])
@pytest.mark.parametrize("name", ["bad name/x", ".hidden", "m.gguf"])
def test_unsafe_snapshot_name_is_refused_before_any_work(verb, name, capsys):
    assert main([*verb, "--name", name]) == 2
    message = capsys.readouterr().err
    assert f"{name!r} is not a valid snapshot name" in message
    assert "no dot first and no .gguf last" in message


@pytest.mark.parametrize("typed", [["rm", "m"], ["prune", "--all"]])
def test_removing_asks_on_a_terminal(root, typed, answer_no, capsys):
    folder = publish(root, "m")
    assert main(["snapshots", *typed]) == 130
    assert folder.is_dir()
    assert main(["snapshots", *typed, "--yes"]) == 0
    assert not folder.exists()


def test_distrust_without_a_key_is_an_error(capsys):
    assert main(["snapshots", "distrust"]) == 2
    assert "FINGERPRINT" in capsys.readouterr().err


HOLDER = """
import sys, time
from edgeinfer.platform.disk import locked
with locked(sys.argv[1]):
    print("locked", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("is_background", [True, False])
def test_warm_takes_over_a_background_build_but_waits_for_another(root, monkeypatch, is_background):
    monkeypatch.setattr(criu, "available", lambda: criu.Probe("root", "", "", "/criu", "4.0"))
    monkeypatch.setattr(jobs, "run_builder", lambda *_: "built")
    inputs = SnapshotInputs(model="m", files=ModelFiles(name="m", paths=()), options=LoadOptions())
    lock = registry.build_lock(root, inputs.name)
    module = builds.JOBS if is_background else "edgeinfer"
    command = [sys.executable, "-c", HOLDER, lock, module]
    stages = []
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline() == b"locked\n"

            def on_stage(stage, _fraction):
                stages.append(stage)
                holder.kill()

            assert jobs.build(inputs, SnapshotsConfig(), on_stage) == "built"
        finally:
            holder.kill()
    assert stages == ([] if is_background else [jobs.WAITING])
    assert holder.returncode == -(signal.SIGTERM if is_background else signal.SIGKILL)


def test_running_build_is_listed(root):
    assert jobs.being_built() == []
    with locked(registry.build_lock(root, "small,ctx=512")):
        assert jobs.being_built() == ["small,ctx=512"]
        building = tuple(jobs.being_built())
        said = SnapshotsResult(snapshots=(), disk_bytes=0, limit_bytes=0, building=building)
        assert said.human() == "small,ctx=512 is being built"


# --- stamps


def is_stale_by(key: str, changed: storage.Manifest, folder) -> None:
    with pytest.raises(SnapshotStaleError) as raised:
        fingerprint.refuse_stale(changed, str(folder))
    assert raised.value.key == key


def test_every_key_of_the_machine_and_every_part_of_a_stamp_is_compared_and_named(root):
    folder = publish(root, "m")
    fingerprint.refuse_stale(storage.read_manifest(str(folder)), str(folder))
    for key in fingerprint.machine_keys():
        changed = storage.read_manifest(str(folder))
        changed.keys[key] = "another"
        is_stale_by(key, changed, folder)
    for number in range(3):
        changed = storage.read_manifest(str(folder))
        parts = changed.files[sys.executable].split()
        parts[number] = "1"
        changed.files[sys.executable] = " ".join(parts)
        is_stale_by(sys.executable, changed, folder)


# --- random seeds

SMAPS = """7f0000000000-7f0000001000 rw-p 00000000 00:00 0
Size:                  4 kB
VmFlags: rd wr mr mw me ac dp
7f0000002000-7f0000003000 rw-p 00000000 00:00 0
VmFlags: rd wr mr mw me ac
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
VmFlags: ex dp
"""


def test_droppable_memory_is_found_by_its_flag():
    ranges = [(0x7F0000000000, 0x7F0000001000), (0xFFFFFFFFFF600000, 0xFFFFFFFFFF601000)]
    assert app_process.droppable_ranges(SMAPS) == ranges
    assert isinstance(app_process.read_droppable_ranges(), list)


def test_reseeding_forgets_the_ranges_and_changes_what_is_drawn():
    area = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area[:4] = b"seed"
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    state = random.getstate()
    drawn = []
    for _ in range(2):
        random.setstate(state)
        drawn.append((app_process.reseed(b"same", [(address, address + 4096)]), random.random()))
    assert drawn[0][0] != drawn[1][0]
    assert drawn[0][1] != drawn[1][1]
    assert area[:4] == bytes(4)


# --- prefetch


@pytest.mark.parametrize("uncached", [0, 1, 2])
def test_prefetch_reads_only_uncached_steps(tmp_path, uncached):
    path = tmp_path / "file"
    step = loaded_model.STEP_BYTES
    sizes = [step, step, 5000]
    path.write_bytes(os.urandom(step + sum(sizes)))
    area = Area(0, sum(sizes), "r--s", step, str(path))
    assert loaded_model.read_ahead(area) == 0
    with open(path, "rb", buffering=0) as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        for index in {0, 1, 2} - {uncached}:
            os.pread(file.fileno(), 1, step + sum(sizes[: index + 1]) - 1)
    assert loaded_model.read_ahead(area) == sizes[uncached]
    assert loaded_model.read_ahead(area) == 0


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("flags\t\t: fpu vme sse2", (4, 1)),
        ("Features\t: fp asimd asimddp", (4, 1)),
        ("Features\t: fp asimd paca pacg", (4, 2)),
        (None, (4, 1)),
    ],
)
def test_pointer_authentication_needs_a_newer_criu(tmp_path, line, version):
    if line:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    assert criu.minimum(str(tmp_path / "cpuinfo")) == version


@pytest.mark.parametrize(
    ("role", "argv", "building", "hint"),
    [
        ("verb", "run", "other", "warm it"),
        ("verb", "run", "m", "a snapshot is being built"),
        ("verb", "chat", "other", ""),
        ("worker", "run", "other", ""),
    ],
)
def test_cold_start_is_said_once_and_never_where_a_chat_draws(root, capsys, role, argv, building, hint):
    app_end, launcher_end = socket.socketpair()
    request = LaunchRequest(role=role, argv=(argv,), hint="warm it")
    host = AppHost(ProcessStart(how="cold", reason="no snapshot"), app_end, None, request=request)
    with launcher_end, app_end, locked(registry.build_lock(root, building)):
        host._say_cold_start("m")
    line = f"edgeinfer: cold start: no snapshot ({hint})\n" if hint else ""
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("outcomes", "reason"),
    [
        (("m: not built: no: memory", "m: not built: it hung", "other: not built: no"), "it hung"),
        (("m: not built: it hung", "m: not built: another process is building it"), ""),
        (("m: not built: it hung", "m: built in 2.0 s, 9 MB on disk"), ""),
        (("m: not built: switched off (snapshots.auto-warm)",), ""),
        (("m,ctx=512: not built: it hung", "m: not built before these options are used again"), ""),
    ],
)
def test_failed_background_build_is_told_by_the_next_cold_start_and_doctor(
    root, capsys, outcomes, reason
):
    for outcome in outcomes:
        builds.log(outcome)
    app_end, launcher_end = socket.socketpair()
    request = LaunchRequest(role="verb", argv=("run",), hint="warm it")
    host = AppHost(ProcessStart(how="cold", reason="no snapshot"), app_end, None, request=request)
    with launcher_end, app_end:
        host._say_cold_start("m")
    clause = f"; not built in the background: {reason}; see {builds.log_file()}" if reason else ""
    assert capsys.readouterr().err == f"edgeinfer: cold start: no snapshot (warm it{clause})\n"
    described = doctor._snapshots().found
    if criu.probe().tier is not None:
        assert ("was not built in the background: it hung" in described) == ("ctx" in outcomes[0])
        assert ("other was not built in the background: no" in described) == bool(reason)


@pytest.mark.parametrize(("age_s", "is_told"), [(60, True), (-60, False)])
def test_a_snapshot_built_after_a_failure_mends_it(root, age_s, is_told):
    builds.log(builds.not_built("m", "it hung", "edgeinfer warm m"))
    publish(root, "m", time.time_ns() - age_s * 10**9)
    assert builds.failures() == ({"m": ("it hung", "edgeinfer warm m")} if is_told else {})


@pytest.mark.parametrize("removed", ["m.gguf", "a b.gguf"])
def test_doctor_names_the_command_that_builds_the_snapshot(root, tmp_path, monkeypatch, removed):
    monkeypatch.setattr(criu, "probe", lambda: criu.Probe("root", "CRIU 4.1"))
    model, adapter = tmp_path / "m.gguf", tmp_path / "a b.gguf"
    for path in (model, adapter):
        path.write_bytes(b"neither a model nor an adapter")
    options = LoadOptions(n_ctx=8192, lora=str(adapter))
    command = f"edgeinfer warm {model} --ctx=8192 '--lora={adapter}'"
    builds.log(jobs.build_if_useful(str(model), options))
    (name,) = builds.failures()
    assert name == storage.snapshot_name(str(model), snapshot_options(options))
    assert doctor._snapshots().fix == command
    inputs = SnapshotInputs(model=str(model), files=ModelFiles(name="m", paths=()), options=options)
    facts = {"name": name, "model": str(model), "depends_on": "", "command": inputs.warm_command}
    registry.record_failure(SnapshotStaleError("planted"), **facts)
    assert doctor._snapshots().fix == command
    (failure,) = registry.list_current_failures()
    result = SnapshotsResult(snapshots=(), disk_bytes=0, limit_bytes=0, failures=(failure,))
    assert f"to build it now: `{command}`" in result.human()
    (tmp_path / removed).unlink()
    assert registry.list_current_failures() == []
    assert doctor._snapshots().fix == ""


@pytest.mark.parametrize("model", ["Other", "m"])
def test_a_worker_loads_itself_what_its_snapshot_does_not_serve(model, monkeypatch):
    """If it asked for a worker, the launcher would resume the same snapshot again, without end."""
    closed = []
    resumed = SimpleNamespace(
        model="m",
        is_open=True,
        serves=lambda *_, **__: False,
        engine=SimpleNamespace(close=lambda: closed.append(True)),
    )
    app_end, launcher_end = socket.socketpair()
    request = LaunchRequest(role="worker", argv=("run",))
    host = AppHost(ProcessStart(how="resumed"), app_end, resumed, request=request)
    monkeypatch.setattr(host, "files", lambda *_, **__: None)
    monkeypatch.setattr(host, "_load_and_describe", lambda name, *_: name)
    monkeypatch.setattr(host, "_ask_for_warming", lambda *_: None)
    with launcher_end, app_end:
        assert host.engine(model, LoadOptions()) == model.lower()
        launcher_end.setblocking(False)
        with pytest.raises(BlockingIOError):
            launcher_end.recv(1)
    assert closed
    assert host.start.how == "cold"


def test_worker_reports_the_start_that_its_load_ended_with(monkeypatch):
    def load(host, *_):
        host.start = ProcessStart(how="cold", reason="its snapshot does not serve it")
        return FakeEngine()

    monkeypatch.setattr(AppHost, "engine", load)
    client_end, worker_end = socket.socketpair()
    request = LaunchRequest(role="worker", model="m", options=b"{}")
    start = ProcessStart(how="resumed", snapshot="m")
    role = (worker_end, request, None, start, [worker_end])
    worker = threading.Thread(target=app_process._run_role, args=role)
    worker.start()
    engine = RemoteEngine(client_end)
    assert (engine.start.how, engine.start.reason) == ("cold", "its snapshot does not serve it")
    engine.close()
    worker.join(60)


@pytest.mark.parametrize("ends_first", [False, True])
def test_stopped_worker_is_continued_when_its_launch_ends(ends_first):
    """Otherwise the endpoint would wait 30 s for its end."""
    launcher, sent = launch.Launcher(CommandLine(["serve"]), 0, 0), {}
    for name, role in (("app", "verb"), ("worker", "worker"), ("stopped", "worker")):
        sent[name] = []
        request = SimpleNamespace(role=role)
        app = SimpleNamespace(request=request, is_stopped=False, signal=sent[name].append)
        launcher._apps.running.append(app)
    launcher._main = launcher._apps.running[0]
    if ends_first:
        launcher._forward(signal.SIGTERM, None)
    launcher._handle_report(app, "stopped")
    if not ends_first:
        launcher._forward(signal.SIGTERM, None)
    assert sent == {"app": [signal.SIGTERM], "worker": [], "stopped": [signal.SIGCONT]}


@pytest.mark.parametrize(
    ("ending", "crashes", "alive_s", "is_restarted"),
    [
        ("exit 70", 0, 1, False),
        ("exit 70", 0, 100, True),
        ("exit 70", 2, 1, True),
        ("signal 9", 0, 1, True),
        ("exit 2", 0, 100, False),
    ],
)
def test_serve_is_restarted_unless_its_first_start_fails(
    monkeypatch, ending, crashes, alive_s, is_restarted
):
    calls = []
    starting = launch.Launcher(CommandLine(["serve"]), 0, 0)
    starting._apps.fds.append(3)  # a listening socket
    starting._crashes = crashes
    monkeypatch.setattr(starting, "_exit", lambda code: calls.append(code))
    monkeypatch.setattr(starting, "_restart", lambda *_: calls.append("restarted"))
    starting._finish(SimpleNamespace(started_s=time.monotonic() - alive_s), ending)
    assert calls == (["restarted"] if is_restarted else [int(ending.split()[1])])


@pytest.mark.parametrize("app_has_ended", [False, True])
@pytest.mark.parametrize("problem", [SnapshotMissingError("m"), OSError(24, "too many files")])
def test_a_worker_that_cannot_start_leaves_no_descriptor(monkeypatch, problem, app_has_ended):
    apps = Apps(CommandLine(["serve"]), select.poll(), 0, 0)
    monkeypatch.setattr(apps, "choice", SimpleNamespace(snapshot="", resume="auto"), raising=False)
    app_end, launcher_end = socket.socketpair()

    def start(choice, request, fds):
        raise problem

    monkeypatch.setattr(apps, "start", start)
    app = SimpleNamespace(link=launcher_end)
    request = messages.StartWorker(model="m", options=b"{}", requested={})
    if app_has_ended:
        app_end.close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        apps.start_worker(app, request)
    assert len(os.listdir("/proc/self/fd")) == before
    if not app_has_ended:
        answer, _ = messages.receive(app_end)
        assert isinstance(answer, messages.Failed)
    launcher_end.close()
    app_end.close()


def test_only_one_background_build_waits_for_another(tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path))
    command = [sys.executable, "-m", "edgeinfer.snapshots.builder.jobs", "nosuch", "{}"]
    with locked(paths.private_dir(paths.state_dir()) / jobs.BACKGROUND_LOCK):
        builders = [subprocess.Popen(command) for _ in range(3)]
        wait_until(lambda: sum(b.poll() is not None for b in builders) == 2, "two builders to end")
    assert [builder.wait(60) for builder in builders] == [0, 0, 0]
    assert (tmp_path / "state/auto-warm.log").read_text().count("not built") == 1


@pytest.mark.parametrize("options", [(), ("--ctx", "256")])
def test_cold_start_of_a_piped_prompt_names_the_model_that_was_loaded(tmp_path, monkeypatch, options):
    (tmp_path / "config.toml").write_text(NO_AUTO_WARM)
    monkeypatch.setenv("EDGEINFER_CONFIG", str(tmp_path / "config.toml"))
    model = make_llama(tmp_path / "tiny.gguf", 512)
    command = (sys.executable, "-m", "edgeinfer")
    run(*command, "pull", str(model), "--name", "tiny", "--in-place", "--quiet")
    completed = run(*command, "run", "tiny", *options, "--max-tokens", "2", input="Hi")
    hint = f"`{' '.join(['edgeinfer warm tiny', *options])}` builds it now"
    assert completed.stderr == f"edgeinfer: cold start: tiny has no snapshot yet ({hint})\n"


@pytest.mark.criu
def test_under_a_seccomp_filter_launches_are_cold_and_say_why(tmp_path):
    def run_filtered(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = (ROOT / "tests/made/filtered.py", sys.executable, "-m", "edgeinfer", *arguments)
        return run(sys.executable, *command, check=False)

    model = make_llama(tmp_path / "tiny.gguf", 512)
    assert run_filtered("pull", str(model), "--name", "tiny", "--in-place").returncode == 0
    completed = run_filtered("run", "tiny", "Hi", "--max-tokens", "2")
    assert completed.returncode == 0
    said = f"edgeinfer: cold start: tiny has no snapshot yet ({criu.FILTERED})\n"
    assert completed.stderr == said
    assert f"launches are cold: {criu.FILTERED}" in run_filtered("doctor").stdout
    refused = run_filtered("warm", "tiny")
    assert (refused.returncode, criu.FILTERED in refused.stderr) == (7, True)


#: A criu that ends by the alarm with which it was started.
HANGS = f"""#!{sys.executable}
import signal
assert 0 < signal.alarm(0) <= {criu.RESTORE_LIMIT_S}
signal.raise_signal(signal.SIGALRM)
"""


def test_criu_that_hangs_in_a_restore_is_ended(tmp_path):
    program = tmp_path / "criu"
    program.write_text(HANGS)
    program.chmod(0o755)
    parked = manifest(criu=str(program), tier=criu.CAPABILITIES)
    child = supervise.resume(parked, str(tmp_path))
    child.link.close()
    with open(child.status_fd, encoding="utf-8") as reports:
        assert reports.read().startswith(f"failed criu did not end within {criu.RESTORE_LIMIT_S} s")
    os.waitpid(child.pid, 0)


def test_criu_work_folder_of_another_user_is_skipped(root, monkeypatch):
    places_tried = [root.parent / "shm", root.parent / "run"]
    monkeypatch.setattr(criu, "_TMPFS", str(places_tried[0]))
    monkeypatch.setattr(paths, "runtime_path", lambda: str(places_tried[1]))
    places_tried[0].mkdir()
    for folder in (places_tried[0] / f"edgeinfer-{os.getuid()}", places_tried[1]):
        folder.mkdir(mode=0o777)
        folder.chmod(0o777)  # others can write to it
    assert criu.work_dir() == str(root.parent / "criu")
    (root.parent / "criu").chmod(0o777)
    with pytest.raises(SnapshotUnsafeError) as refused:
        criu.work_dir()
    for folder in ("shm", "run", "criu"):
        assert f"{root.parent}/{folder}" in refused.value.message


# --- limits


def use(folder, at_s):
    os.utime(folder / storage.LOCK, (at_s, at_s))


def test_least_recently_used_snapshots_are_pruned_first(root):
    mib = 1 << 20
    for n, name in enumerate(("a", "b", "c")):
        use(publish(root, name, n + 1, size=4 * mib), 1000 + n)
    config = SnapshotsConfig(max_total_gib=9 * mib / (1 << 30))
    for path in root.rglob(storage.MEMORY):
        path.write_bytes(os.urandom(4 * mib))
    assert registry.make_room(root, config, keep="a") == ["b"]
    assert sorted(storage.generations(str(root))) == ["a", "c"]


def test_build_leaves_free_disk_space(root):
    free = free_bytes(root)
    with pytest.raises(DiskFullError, match="stay free"):
        jobs.refuse_full(root, "m", free - (1 << 30))


def test_named_snapshot_is_pruned_last(root):
    use(publish(root, "m,mine", 1), 1000)
    use(publish(root, "m", 2), 2000)
    use(publish(root, "m,ctx=512", 3, requested={"n_ctx": "512"}), 3000)
    names = [storage.name_of(folder.name) for folder in registry.by_last_use(root)]
    assert names == ["m", "m,ctx=512", "m,mine"]


def test_snapshot_whose_name_v0_2_0_derived_from_options_is_refused_and_pruned_first(root):
    old = publish(root, "m,ctx8192", 1, requested={"n_ctx": "8192"}, keys={"edgeinfer": "0.1"})
    use(old, 2000)
    use(publish(root, "m", 2), 1000)
    launch_words = ("run", "m", "hello")
    with pytest.raises(SnapshotMissingError, match="m has no snapshot with --ctx 8192"):
        selection.launch_choice(CommandLine([*launch_words, "--ctx", "8192"])).find()
    with pytest.raises(SnapshotStaleError, match="m,ctx8192 was made with another edgeinfer") as stale:
        selection.launch_choice(CommandLine([*launch_words, "--snapshot", "ctx8192"])).find()
    assert stale.value.hint == "build it again: `edgeinfer warm m --ctx 8192 --name ctx8192`"
    assert registry.state_of(old)[1].startswith(
        "the snapshot m,ctx8192 was made with another edgeinfer"
    )
    assert [storage.name_of(folder.name) for folder in registry.by_last_use(root)] == ["m,ctx8192", "m"]


def test_changed_models_toml_is_reported_without_its_times(root):
    publish(root, "m", keys={"models.toml": "1764417600000000000"})
    with pytest.raises(SnapshotStaleError) as stale:
        selection.find("m", {})
    assert stale.value.message == "models.toml was changed after the snapshot m was made"


def test_older_generations_and_stale_snapshots_are_pruned(root):
    publish(root, "a", 1)
    publish(root, "a", 2)
    registry.drop_older(root, "a")
    assert [os.path.basename(f) for f in storage.generations(str(root))["a"]] == [folder_of("a", 2)]
    (root / folder_of("a", 2) / storage.MEMORY).write_bytes(b"")
    assert registry.remove_stale(root) == ["a"]
    assert storage.generations(str(root)) == {}


def test_orphaned_snapshots_are_pruned_first(root, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    publish(root, "m", 2, program=str(other))
    use(publish(root, "m", 1), 1000)
    registry.drop_older(root, "m")
    assert registry.remove_stale(root) == []
    other.rmdir()
    assert [f.name for f in registry.by_last_use(root)][1:] == [folder_of("m", 1)]
    assert registry.remove_stale(root) == ["m"]
    assert registry.find("m").name == folder_of("m", 1)


def test_own_files_are_those_of_the_whole_package():
    stamped = {os.path.relpath(path, fingerprint.PACKAGE) for path in fingerprint.package_stamps()}
    assert stamped >= {"cli/main.py", "launcher/launch.py", "snapshot_format/criu.py"}


# --- what a launch imports

LAUNCH = """
import sys, json
before = set(sys.modules)
from edgeinfer.launcher import main
from edgeinfer.launcher.launch import Launcher
print(json.dumps(sorted({m.split(".")[0] for m in set(sys.modules) - before})))
"""
CHEAP = """
    __future__ _ctypes _signal _socket _struct ctypes edgeinfer errno gc math select struct time types
""".split()


def test_launch_imports_only_cheap_modules():
    assert set(json.loads(run(sys.executable, "-I", "-c", LAUNCH).stdout)) <= set(CHEAP)


SPIN_COUNTS = """
import os, sys
def seen(event, arguments):
    if event == "ctypes.dlopen" and "libllama" in str(arguments[0]):
        print(os.environ.get("GOMP_SPINCOUNT"))
sys.addaudithook(seen)
from edgeinfer.runtime.llama import libllama
print(os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("user_spin_count", "while_mapped", "after"), [("", "1000", "None"), ("7", "7", "7")]
)
def test_spin_count_is_set_while_libgomp_is_mapped_and_not_inherited(
    user_spin_count, while_mapped, after
):
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environment |= {"GOMP_SPINCOUNT": user_spin_count} if user_spin_count else {}
    assert run_python(SPIN_COUNTS, env=environment).split() == [while_mapped, after]


LIMITED = """
import resource, sys
from edgeinfer.launcher.messages import LaunchRequest
from edgeinfer.snapshots.restore import app_process
env = "A=1" if len(sys.argv) == 1 else "EDGEINFER_DEBUG=1"
app_process.adopt_environment(LaunchRequest(role="verb", env=(env,), limits={"RLIMIT_CORE": "4096"}))
print(resource.getrlimit(resource.RLIMIT_CORE)[0])
"""


@pytest.mark.parametrize(("arguments", "bytes_allowed"), [((), "0"), (("debug",), "4096")])
def test_core_file_is_written_only_for_debugging(arguments, bytes_allowed):
    def allow():
        resource.setrlimit(resource.RLIMIT_CORE, (4096, resource.getrlimit(resource.RLIMIT_CORE)[1]))

    assert run_python(LIMITED, *arguments, preexec_fn=allow).strip() == bytes_allowed


ABORT = """
import ctypes
from edgeinfer.runtime.llama import libllama
libllama.lib()
libllama.base_library().ggml_abort(b"here.c", 7, b"it broke")
"""


def test_abort_in_ggml_runs_no_debugger(tmp_path):
    for name in ("gdb", "lldb"):
        (tmp_path / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/attached\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = run(sys.executable, "-c", ABORT, env=environment, check=False)
    assert done.returncode == -6
    assert "here.c:7: it broke" in done.stderr
    assert not (tmp_path / "attached").exists()
