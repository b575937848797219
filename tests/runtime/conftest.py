"""Engines of the real models, loaded once a session; a test that changes an engine loads its own."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from edgeinfer.platform.machine import Machine, Memory
from edgeinfer.runtime.engine import LlamaEngine, load_engine
from edgeinfer.runtime.event_stream import CollectedAnswer
from edgeinfer.runtime.events import Event
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.runtime.requests import GenerateRequest, Sampling

from ..conftest import BUILD_CACHE

GREEDY = Sampling(temperature=0)
LAVAPIPE = BUILD_CACHE / "lavapipe"


def machine(available_bytes: int, cores: int = 4, quota: float | None = None) -> Machine:
    """A machine that is only described, with two logical CPUs a core."""
    memory = Memory(total_bytes=available_bytes, available_bytes=available_bytes, reason="made up")
    return Machine(physical_cores=cores, logical_cpus=2 * cores, quota=quota, memory=memory)


def load(path: Path, **options: object) -> LlamaEngine:
    """A real engine; small caches unless the test says otherwise."""
    load_options = {"n_ctx": 2048, "n_parallel": 8, **options}
    return load_engine(ModelFiles(name=path.stem, paths=(str(path),)), LoadOptions(**load_options))  # type: ignore[arg-type]


def ask(
    prompt: str | tuple[int, ...] = "The capital of France is", **fields: object
) -> GenerateRequest:
    """A request for eight greedy tokens, whatever they are."""
    request_fields: dict[str, object] = {
        "prompt": prompt,
        "sampling": GREEDY,
        "max_tokens": 8,
        "ignore_eos": True,
        **fields,
    }
    return GenerateRequest(**request_fields)  # type: ignore[arg-type]


def collect(stream: Iterable[Event]) -> CollectedAnswer:
    reply = CollectedAnswer()
    for event in stream:
        reply.add(event)
    return reply


def answer(engine: Engine, request: GenerateRequest) -> CollectedAnswer:
    return collect(engine.submit(request))


def answers(engine: Engine, requests: Iterable[GenerateRequest]) -> list[CollectedAnswer]:
    """Ask all at once, and return what is answered to each."""
    return [collect(stream) for stream in [engine.submit(request) for request in requests]]


@pytest.fixture(scope="session")
def smol(smollm2: Path) -> Iterator[LlamaEngine]:
    """SmolLM2 in 2,048 tokens of shared cache."""
    with closing(load(smollm2)) as engine:
        yield engine


@pytest.fixture(scope="session")
def gemma(gemma3: Path) -> Iterator[LlamaEngine]:
    """Gemma 3 in 2,048 tokens of shared cache."""
    with closing(load(gemma3)) as engine:
        yield engine


@pytest.fixture(scope="session")
def lavapipe() -> dict[str, str]:
    """The environment in which the Vulkan loader finds Mesa's software device and no other."""
    driver = str(LAVAPIPE / "lvp_icd.json")
    drivers = {"VK_DRIVER_FILES": driver, "VK_ICD_FILENAMES": driver}
    return {"LD_LIBRARY_PATH": str(LAVAPIPE / "loader"), **drivers}
