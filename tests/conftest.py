"""Every test starts from a clean environment and a home of its own; models come from the set-up's cache."""

from __future__ import annotations

import os
import re
import signal
import tomllib
from pathlib import Path

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
_OURS = ("EDGEINFER_", "HF_", "HUGGING", "XDG_", "OTEL_", "NO_COLOR", "NOTIFY_SOCKET", "LISTEN_")


# A suite started in the background inherits an ignored SIGINT, and so would every program whose Ctrl-C
# is tested.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--allowed-skips",
        metavar="TABLE",
        help="fail when a test is skipped for a reason that is not in this table of .ci/allowed-skips.toml",
    )


def _skips_not_allowed(config: pytest.Config) -> list[str]:
    """Say where and why each test was skipped that --allowed-skips does not let be skipped."""
    table = config.getoption("--allowed-skips")
    if not table:
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
