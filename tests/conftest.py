"""Every test starts from a clean environment and a home of its own; models come from the set-up's cache."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).parents[1]
#: Where tools/setup.sh keeps what it makes. EDGEINFER_BUILD_CACHE names another folder.
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
_LONGEST = {name: n for n, name in enumerate(("cluster", "snapshots", "binary", "engine", "http"))}
#: Session fixtures that take many seconds: the shipped file built, and a warm home each of a user and of root.
_EXPENSIVE = ("binary", "anybody")
_OURS = ("EDGEINFER_", "HF_", "HUGGING", "XDG_", "OTEL_", "NO_COLOR", "NOTIFY_SOCKET", "LISTEN_")


# A suite started in the background inherits an ignored SIGINT, and so would every program whose Ctrl-C
# is tested.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy the machine is, and nothing of ours.
hypothesis.settings.register_profile(
    "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--allowed-skips",
        metavar="TABLE",
        help="fail when a test is skipped for a reason that is not in this table of .ci/allowed-skips.toml",
    )


def pytest_configure() -> None:
    """Give each of the processes that `-n` starts its share of the processors, and so all that it starts.

    llama.cpp's threads wait for each other by turning: two programs that both take every processor are
    many times slower than two that have one each.
    """
    if not WORKER:
        return
    number, workers = int(WORKER.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[number::workers] or {cpus[number % len(cpus)]})


@contextlib.contextmanager
def one_process_at_a_time(what: str) -> Iterator[None]:
    """Hold a lock on `what`, which the pytest processes of one machine make once for all."""
    with (BUILD_CACHE / f"{what}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


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
    """The folder of tests/ that a test stands in."""
    return item.path.relative_to(ROOT).parts[1]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under `-n`, keep together what shares fixtures, and begin with what takes longest."""
    if not WORKER:
        return
    items.sort(key=lambda item: _LONGEST.get(_room(item), len(_LONGEST)))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_together(item)))


def _skips_not_allowed(config: pytest.Config) -> list[str]:
    """Say where and why each test was skipped that --allowed-skips does not let be skipped."""
    table = config.getoption("--allowed-skips")
    if not table or WORKER:  # who started us counts them
        return []
    allowed = tomllib.loads((ROOT / ".ci/allowed-skips.toml").read_text("utf-8"))[table]
    reporter = config.pluginmanager.getplugin("terminalreporter")
    found = []
    for report in reporter.stats.get("skipped", []):
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        if not any(re.search(pattern, reason) for pattern in allowed):
            found.append(f"{report.nodeid}: {reason}")
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.OK and _skips_not_allowed(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for skipped in _skips_not_allowed(config):
        terminalreporter.write_line(f"SKIPPED, NOT ALLOWED {skipped}", red=True)


@pytest.fixture(autouse=True)
def _clean_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for name in list(os.environ):
        if name.startswith(_OURS) and name != "EDGEINFER_TEST_MODELS":
            monkeypatch.delenv(name)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("EDGEINFER_HOME", str(home / "edgeinfer"))


def _real(name: str) -> Path:
    path = TEST_MODELS / name
    assert path.is_file(), f"{path} is missing: run `tools/setup.sh test`"
    return path


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


@pytest.fixture
def answer_no(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make stdin a terminal at which "n" was typed."""
    ours, theirs = os.openpty()
    os.write(ours, b"n\n")
    with open(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        yield
    os.close(ours)
