"""Every test starts from a clean environment and a home of its own; models come from the set-up's cache."""

import contextlib
import fcntl
import functools
import gc
import importlib.abc
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import hypothesis
import pytest

ROOT = Path(__file__).parents[1]
#: Where scripts/setup.sh keeps what it makes. EDGEINFER_BUILD_CACHE names another folder.
BUILD_CACHE = Path(
    os.environ.get("EDGEINFER_BUILD_CACHE")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgeinfer-build"
)
#: Where `make test` pulls the two real models to. EDGEINFER_TEST_MODELS names another folder.
TEST_MODELS = Path(os.environ.get("EDGEINFER_TEST_MODELS") or BUILD_CACHE / "test-home/data/models")
SMOLLM2 = "smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA3 = "gemma-3-270m/gemma-3-270m-q4_k_m.gguf"
#: The name of this process among those that pytest's `-n` started, or nothing.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
#: The folders whose files take longest, in that order.
_LONGEST = {name: n for n, name in enumerate(("cluster", "snapshots", "binary", "runtime", "server"))}
#: What `--fast` leaves out: tests with these marks; tests that reach these fixtures, which need a model, build the shipped
#: file, draw the chat or download; tests that import these packages, which the environment of `make lint` has not; and tests
#: that start a program.
_SLOW_MARKS = ("model", "criu", "needs", "slow")
_SLOW_FIXTURES = ("smollm2", "gemma3", "lavapipe", "place", "binary", "drive", "snap_compare", "server")
_LARGE_PACKAGES = "llama_cpp anthropic botocore flask kubernetes_validate moto ollama openai PyInstaller ray schemathesis".split()
_STARTS_A_PROGRAM = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn")
#: What the tests marked `needs` need beyond `make run`. `make test` leaves them out; `make test-all` runs them.
NEEDS = {
    "arm64": "a compiler for arm64 and qemu",
    "axe": "axe-core, through npm",
    "binary": "the shipped file",
    "containers": "podman",
    "encoder": "libmtmd, which encodes pictures",
    "fuzz": "two minutes of requests made from the OpenAPI document",
    "levels": "our C++ for other processors than this one",
    "ray": "a Ray cluster",
    "registry": "docker-registry",
    "root": "a second run, as root",
    "sanitizers": "our C++ compiled with sanitizers",
    "systemd": "a systemd as process 1",
    "time": "5 to 60 seconds each",
    "vulkan": "the Vulkan backend and a software GPU",
}
_SET_UP = "scripts/setup.sh test-all"
#: What of NEEDS this machine may lack: its file, and why tests are skipped without it.
_FILES = {
    "axe": (BUILD_CACHE / "axe/axe.min.js", f"needs axe-core: {_SET_UP}"),
    "encoder": (
        Path(sys.prefix, "lib/edgeinfer/native/libedgeinfer-mtmd.so.1"),
        "libedgeinfer-mtmd is not built: native/mtmd.sh",
    ),
    "registry": (BUILD_CACHE / "docker-registry", f"docker-registry is missing: {_SET_UP}"),
    "vulkan": (
        BUILD_CACHE / "lavapipe",
        f"Mesa's software device is not here: {_SET_UP} fetches it where apt is",
    ),
}
#: A test that reaches such a fixture is marked.
_NEEDED_BY_FIXTURE = {
    "binary": "binary",
    "lavapipe": "vulkan",
    "podman": "containers",
    "registry": "registry",
    "systemd": "systemd",
}
#: Session fixtures that take many seconds: the shipped file built, and a warm home each of a user and of root.
_EXPENSIVE = ("binary", "anybody")
_OURS = ("EDGEINFER_", "HF_", "HUGGING", "XDG_", "OTEL_", "NO_COLOR", "NOTIFY_SOCKET", "LISTEN_")


# A suite started in the background inherits an ignored SIGINT, and so would every program whose Ctrl-C
# is tested.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes depends on what else runs.
hypothesis.settings.register_profile(
    "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy")


#: A word of a skip's reason → what runs the test. Other reasons name a command or the machine.
_RUN_BY = {"root": "the same command as root", "--fast": "make test"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--allowed-skips",
        metavar="TABLE",
        help="fail when a test is skipped for a reason that is not in this table of .ci/allowed-skips.toml",
    )
    parser.addoption(
        "--cases",
        type=int,
        default=1,
        metavar="N",
        help="more than 1: only tests of generated cases, N times as many",
    )
    parser.addoption("--as-root", action="store_true", help="leave out what an ordinary user's run has")
    parser.addoption("--fast", action="store_true", help="no llama.cpp, CRIU, models or slow tests")
    parser.addoption(
        "--needs",
        choices=("none", "only", "any"),
        default="any",
        help="leave out the tests marked `needs`, run no others, or run all (the default)",
    )


class _LargePackages(importlib.abc.MetaPathFinder):
    """Skip the test, or the test module, that imports a large package."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        package = name.partition(".")[0]
        if package in _LARGE_PACKAGES and package not in sys.modules:  # pytest's plugins may be loaded
            raise pytest.skip.Exception(f"--fast: imports {name}", allow_module_level=True)


_in_a_test = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Note that a test runs: pytest-xdist itself starts programs before and after."""
    global _in_a_test
    _in_a_test = True
    if WORKER:
        with _turnstile():
            fcntl.flock(_running(), fcntl.LOCK_SH)
    try:
        return (yield)
    finally:
        _in_a_test = False
        if WORKER:
            fcntl.flock(_running(), fcntl.LOCK_UN)


def _refuse_programs(event: str, args: tuple[object, ...]) -> None:
    """Skip the test whose thread starts a program."""
    if (
        _in_a_test
        and event in _STARTS_A_PROGRAM
        and threading.current_thread() is threading.main_thread()
    ):
        raise pytest.skip.Exception("--fast: starts a program")


def _is_slow(item: pytest.Item) -> bool:
    assert isinstance(item, pytest.Function)
    marked = any(item.get_closest_marker(mark) for mark in _SLOW_MARKS)
    return marked or not set(_SLOW_FIXTURES).isdisjoint(item.fixturenames)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Start two processes for each processor, at most 4: a third of a test's time is waiting."""
    return min(2 * len(os.sched_getaffinity(0)), 4)


def pytest_configure(config: pytest.Config) -> None:
    """Give each of the processes that `-n` starts its share of the processors, and so all that it starts.

    llama.cpp's threads wait for each other by turning: two programs that both take every processor are
    many times slower than two that have one each.
    """
    if config.getoption("--fast"):
        hypothesis.settings.register_profile(
            "fast", hypothesis.settings.get_profile("busy"), max_examples=20
        )
        hypothesis.settings.load_profile("fast")
        sys.meta_path.insert(0, _LargePackages())
        sys.addaudithook(_refuse_programs)
        # a skipped test leaves its sockets to the collector
        config.addinivalue_line("filterwarnings", "ignore::pytest.PytestUnraisableExceptionWarning")
    if not WORKER:
        folder = tempfile.TemporaryDirectory(prefix="edgeinfer-tests-")
        config.add_cleanup(folder.cleanup)
        os.environ[_LOCKS] = folder.name
        return
    number, workers = int(WORKER.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[number::workers] or {cpus[number % len(cpus)]})


@contextlib.contextmanager
def one_process_at_a_time(resource: str) -> Iterator[None]:
    """Hold a lock on `resource`, which the pytest processes of one machine make once for all."""
    with _locked(BUILD_CACHE / f"{resource}.lock"):
        yield


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


#: The environment variable of a folder of this run, which the processes that `-n` started share.
_LOCKS = "PYTEST_RUN_LOCKS"


def _turnstile() -> contextlib.AbstractContextManager[None]:
    return _locked(Path(os.environ[_LOCKS], "turnstile.lock"))


def _together(item: pytest.Item) -> str:
    """Name what runs in one process: a file, or in it what shares an expensive fixture with others of its
    room.
    """
    assert isinstance(item, pytest.Function)
    params = item.callspec.params if hasattr(item, "callspec") else {}
    shared = next((name for name in _EXPENSIVE if name in item.fixturenames), "")
    path = item.path.relative_to(ROOT)
    return f"{_room(item) if shared else path} {shared} {params.get(shared, '')}".rstrip()


def _room(item: pytest.Item) -> str:
    """Return the folder of tests/ that contains a test."""
    return item.path.relative_to(ROOT).parts[1]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, object, object]:
    """Let one process compile a file of tests, and the others that `-n` started load the result."""
    if not (WORKER and isinstance(collector, pytest.Module)):
        return (yield)
    with _locked(Path(os.environ[_LOCKS], f"{collector.path.stem}.lock")):
        return (yield)


@functools.cache
def _running() -> BinaryIO:
    """Return the file on which each process that `-n` started holds a shared lock while it runs a test."""
    return Path(os.environ[_LOCKS], "running.lock").open("w")


@contextlib.contextmanager
def without_other_tests() -> Iterator[None]:
    """Wait for the tests of the other processes that `-n` started, and let them begin none in the block.

    Background builds have the lowest CPU priority: next to tests they took more than two minutes.
    """
    if WORKER:
        fcntl.flock(_running(), fcntl.LOCK_UN)  # another process may wait for this one
        with _turnstile():
            fcntl.flock(_running(), fcntl.LOCK_EX)
    try:
        yield
    finally:
        if WORKER:
            fcntl.flock(_running(), fcntl.LOCK_SH)


def _user_of(item: pytest.Item) -> str:
    """Return "root" or "ordinary user" for a test that runs once as each, otherwise ""."""
    return str(getattr(getattr(item, "callspec", None), "params", {}).get("anybody", ""))


def _needs(item: pytest.Item) -> set[str]:
    """Return what a test needs beyond `make run`: names of NEEDS."""
    assert isinstance(item, pytest.Function)
    by_fixture = {_NEEDED_BY_FIXTURE.get(name, "") for name in item.fixturenames} - {""}
    for need in by_fixture:
        item.add_marker(pytest.mark.needs(need))
    names = by_fixture.union(*(mark.args for mark in item.iter_markers("needs")))
    names |= {"root"} & {_user_of(item)}
    assert names <= NEEDS.keys(), f"{item.nodeid} needs {names - NEEDS.keys()}: not in NEEDS"
    return names


def _is_generated(item: pytest.Item) -> bool:
    """Return whether `--cases` gives a test more cases, or a variable does: `make test-nightly`."""
    assert isinstance(item, pytest.Function)
    has_seeds = any(mark.args[:1] == ("seed",) for mark in item.iter_markers("parametrize"))
    has_examples = hypothesis.is_hypothesis_test(item.obj)
    return has_seeds or has_examples or "cases" in item.fixturenames or "fuzz" in item.nodeid


def is_make_test(config: pytest.Config) -> bool:
    """Return whether the tests marked `needs` are left out, and the others are to be short."""
    return bool(config.getoption("--needs") == "none")


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Multiply the examples of Hypothesis and the parameters `seed` of a test by `--cases`.

    `make test` tries at most as many examples as Hypothesis does by default.
    """
    factor, test = metafunc.config.getoption("--cases"), metafunc.function
    most = hypothesis.settings.default.max_examples if is_make_test(metafunc.config) else math.inf
    if hypothesis.is_hypothesis_test(test):
        settings = test._hypothesis_internal_use_settings
        test._hypothesis_internal_use_settings = hypothesis.settings(
            settings, max_examples=factor * min(settings.max_examples, most)
        )
    marks = metafunc.definition.own_markers
    for index, mark in enumerate(marks):
        if mark.name == "parametrize" and mark.args[:1] == ("seed",):
            marks[index] = pytest.mark.parametrize("seed", range(factor * len(mark.args[1]))).mark


#: What of NEEDS, or "" for nothing of it → how many tests were left out for it.
_left_out: Counter[str] = Counter()


def _is_left_out(config: pytest.Config, item: pytest.Item) -> bool:
    needs, choice = _needs(item), config.getoption("--needs")
    if (choice == "none" and needs) or (choice == "only" and not needs):
        _left_out[min(needs, default="")] += 1
        return True
    for need in needs & _FILES.keys():
        path, reason = _FILES[need]
        item.add_marker(pytest.mark.skipif(not path.exists(), reason=reason))
    if config.getoption("--fast"):
        return _is_slow(item)
    if config.getoption("--cases") > 1 and not _is_generated(item):
        return True
    return config.getoption("--as-root") and _user_of(item) == "ordinary user"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the options say; under `-n`, keep together what shares fixtures, the longest first."""
    left_out = {item for item in items if _is_left_out(config, item)}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]
    if not WORKER:
        return
    items.sort(key=lambda item: _LONGEST.get(_room(item), len(_LONGEST)))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_together(item)))
        if _room(item) == "snapshots" and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1200))  # some wait for tests of other processes to end


def pytest_collection_finish() -> None:
    """Spare the collector all that was imported: pytest collects five times at the end, 0.4 s each."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the counts of a process that `-n` started: each has collected every test."""
    _left_out.update(Counter(getattr(node, "workeroutput", {}).get("left_out", {})) - _left_out)


def _skip_reasons(config: pytest.Config) -> Counter[str]:
    """Return how many tests were skipped for each reason."""
    skipped = config.pluginmanager.getplugin("terminalreporter").stats.get("skipped", [])
    return Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)


def _skips_not_allowed(config: pytest.Config) -> list[str]:
    """Return the reasons for which --allowed-skips does not let tests be skipped."""
    table = config.getoption("--allowed-skips")
    if not table or WORKER:  # the process that started this one counts them
        return []
    tables = tomllib.loads((ROOT / ".ci/allowed-skips.toml").read_text("utf-8"))
    allowed = "|".join(tables["either"] | tables[table])
    return [reason for reason in _skip_reasons(config) if not re.search(allowed, reason)]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if WORKER:
        _running().close()
        session.config.workeroutput["left_out"] = dict(_left_out)  # type: ignore[attr-defined]
    if session.exitstatus == pytest.ExitCode.OK and _skips_not_allowed(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if WORKER:
        return
    # .ci/run repeats failed tests only after a whole run
    if session.config.getoption("--allowed-skips"):
        ended = ROOT / ".pytest_cache/ended"
        ended.parent.mkdir(exist_ok=True)
        ended.write_text(f"{int(session.exitstatus)} {len(_skips_not_allowed(session.config))}\n")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Generator[None, object, object]:
    """After pytest's summary, count the tests that did not run by reason, with what would run them."""
    result = yield
    not_allowed = _skips_not_allowed(config)
    for reason, count in _skip_reasons(config).most_common():
        command = next((command for word, command in _RUN_BY.items() if word in reason), "")
        terminalreporter.write_line(
            f"skipped: {count} tests: {reason}"
            + f" ({command} runs them)" * bool(command)
            + " (NOT ALLOWED)" * (reason in not_allowed),
            red=reason in not_allowed,
        )
    for name, count in sorted(_left_out.items()):
        needed = f"{NEEDS[name]}: make test-all" if name else "nothing beyond `make run`: make test"
        terminalreporter.write_line(f"not run: {count} tests that need {needed}")
    return result


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Paths of homes to come: `mktemp` would list those of all earlier tests, 20 ms after some thousand."""
    folder = tmp_path_factory.mktemp("homes")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(scope="session")
def repeats(pytestconfig: pytest.Config) -> Callable[[int], int]:
    """Return how many of `full` repetitions to do: all in `make test-all`, a third in `make test`."""
    share = 3 if is_make_test(pytestconfig) else 1
    return lambda full: -(-full // share)


@pytest.fixture(scope="session")
def cases(repeats: Callable[[int], int], pytestconfig: pytest.Config) -> Callable[[int], int]:
    """Return how many of `full` generated cases to try: `repeats`, and `--cases` times as many."""
    return lambda full: repeats(full) * int(pytestconfig.getoption("--cases"))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, homes: Iterator[Path]) -> None:
    for name in list(os.environ):
        if name.startswith(_OURS) and name != "EDGEINFER_TEST_MODELS":
            monkeypatch.delenv(name)
    home = next(homes)
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("EDGEINFER_HOME", str(home / "edgeinfer"))
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "")  # tests with a device name it


def _real(name: str) -> Path:
    path = TEST_MODELS / name
    assert path.is_file(), f"{path} is missing: run `scripts/setup.sh test`"
    return path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 1 MiB, which only root can mount."""
    if os.getuid() != 0:
        pytest.skip("not root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", folder]
    if subprocess.run(mount, check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct Q4_1: the default model, an instruction-tuned one."""
    return _real(SMOLLM2)


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M Q4_K_M: a base model with a 262,144-token vocabulary and sliding-window
    attention.
    """
    return _real(GEMMA3)


def flip_bit(path: Path, offset: int) -> None:
    """Change the lowest bit of a file's byte."""
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), offset)


@pytest.fixture
def as_json(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run a command line with `--json`, which exits with `code`; return its result, or its error."""

    def run(*typed: str, code: int = 0) -> Any:
        from edgeinfer.cli.main import main

        capsys.readouterr()
        assert main([*typed, "--json"]) == code
        body = json.loads(capsys.readouterr().out)
        assert body["schema"] == "edgeinfer/1"
        return body["result"] if "result" in body else body["error"]

    return run


@pytest.fixture
def answer_no(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make stdin a terminal at which "n" was typed."""
    controller, terminal_fd = os.openpty()
    os.write(controller, b"n\n")
    with open(terminal_fd) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        yield
    os.close(controller)
