"""The decode thread: whatever ends it, no caller waits for ever, and the engine says so."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from edgeinfer.errors import EngineClosedError
from edgeinfer.runtime.engine import LlamaEngine
from edgeinfer.runtime.requests import GenerateRequest

from ...made.made_models import make_llama
from ..conftest import load

REQUEST = GenerateRequest(prompt="Roses", max_tokens=4)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LlamaEngine]:
    path = make_llama(tmp_path / "tiny.gguf", 512)
    with closing(load(path, n_ctx=256, n_parallel=2)) as opened:
        yield opened


def fail(*_: object) -> None:
    raise MemoryError("no more")


def test_dead_loop_fails_its_requests_and_all_later_ones(
    engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (engine.health(), engine.is_open) == ("", True)
    list(engine.submit(REQUEST))
    monkeypatch.setattr(engine._core, "step", fail)
    monkeypatch.setattr(engine._core, "fail_all", fail)
    with pytest.raises(EngineClosedError, match="the decode loop failed: MemoryError: no more"):
        list(engine.submit(REQUEST))
    assert "MemoryError" in engine.health()
    assert not engine.is_open
    for late in (lambda: engine.submit(REQUEST), lambda: engine.between_steps(int)):
        with pytest.raises(EngineClosedError, match="the decode loop failed"):
            late()
    assert engine.metrics().queued == 0


def test_failed_work_between_steps_fails_its_caller_alone(engine: LlamaEngine) -> None:
    with pytest.raises(MemoryError):
        engine.between_steps(fail)
    assert list(engine.submit(REQUEST))
    assert engine.health() == ""
