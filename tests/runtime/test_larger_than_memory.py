"""Weights that are larger than memory, in a process under a real limit of a control group."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import made_families
import pytest
from made_families import FAMILIES, Family, make_family
from other_processes import run_python

from edgeinfer.models.gguf import file_type
from edgeinfer.models.progress import Job
from edgeinfer.models.quantizing import QuantizeOptions, run_quantizer

MIB = 1 << 20
_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")
#: Joins the group in argv[1], then answers a prompt and says how; with a new limit in argv[5], again
#: once it has been lowered, in the file argv[6], and fewer weights are in memory.
PROGRAM = """
import json, os, resource, sys
from pathlib import Path
if sys.argv[1]:
    open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
from edgeinfer.runtime.engine import load_engine
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.runtime.requests import GenerateRequest, Sampling
options = LoadOptions(n_ctx=int(sys.argv[3]), n_parallel=1, n_threads=2)
def read():
    lines = open("/proc/self/io").read().split()
    return int(lines[lines.index("read_bytes:") + 1])
def held():
    return engine.metrics().pinned_bytes + engine.metrics().expert_slot_bytes
request = GenerateRequest(prompt=sys.argv[4], sampling=Sampling(temperature=0), max_tokens=4, ignore_eos=True)
def answer():
    return "".join(getattr(event, "text", "") for event in engine.submit(request))
start = read()
engine = load_engine(ModelFiles(name="x", paths=(sys.argv[2],)), options)
before, faults = read(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt
said = {"loaded": before - start, "text": answer(), "held": held(), "read": read() - before}
said["faults"] = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults
if len(sys.argv) > 5:
    limit = int(sys.argv[5])
    while held() >= said["held"] and limit > 300 << 20:
        limit -= 4 << 20
        (Path(sys.argv[1]) / sys.argv[6]).write_text(str(limit))
        answer()
    said |= {"again": answer(), "less": held()}
print(json.dumps(said | {"warnings": engine.info.warnings, "n_ctx": engine.info.n_ctx}))
engine.close()
"""
Answer = Callable[..., dict[str, Any]]


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Callable[[int], str]]:
    """`group(bytes)`: a control group with this limit, which ends with the test."""
    base = _V1 if (_V1 / "memory.limit_in_bytes").exists() else _V2
    folder = base / f"edgeinfer-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("no control group can be made here: it needs root")
    limit = folder / ("memory.limit_in_bytes" if base == _V1 else "memory.max")
    if not limit.exists():
        folder.rmdir()
        pytest.skip("no control group of this machine limits memory")

    def set_limit(n_bytes: int) -> str:
        limit.write_text(str(n_bytes))
        return str(folder)

    yield set_limit
    folder.rmdir()


@pytest.fixture(scope="module")
def model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 in 32 bits."""
    path = tmp_path_factory.mktemp("model") / "f32.gguf"
    run_quantizer(smollm2, path, file_type("F32"), Job(), QuantizeOptions())
    assert path.stat().st_size > 500 * MIB
    return path


def answer(
    group: str, model: Path, n_ctx: int = 512, prompt: str = "The river", later_limit: int = 0
) -> dict[str, Any]:
    """Answer in a process that starts with nothing of the model in the page cache."""
    fd = os.open(model, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    name = next((n for n in ("memory.limit_in_bytes", "memory.max") if (Path(group) / n).exists()), "")
    more = [later_limit, name] if later_limit else []
    said = run_python(PROGRAM, group, model, n_ctx, prompt, *more, timeout=300)
    result: dict[str, Any] = json.loads(said.splitlines()[-1])
    return result


def test_a_model_larger_than_memory_answers_with_a_warning(
    group: Callable[[int], str], model: Path
) -> None:
    short = answer(group(420 * MIB), model)
    roomy = answer("", model)
    assert short["text"] == roomy["text"] != ""
    assert short["n_ctx"] == 512
    (warning,) = short["warnings"]
    assert "do not fit into the" in warning
    assert "a token" in warning
    assert not roomy["warnings"]
    assert short["read"] > 2 * (model.stat().st_size - 420 * MIB)  # again for every token
    assert short["loaded"] < model.stat().st_size - 200 * MIB  # which is not read to be dropped again


def test_what_is_in_memory_follows_a_limit_that_changes(
    group: Callable[[int], str], model: Path
) -> None:
    prompt = "A long prompt of many rows. " * 20
    short = answer(group(640 * MIB), model, prompt=prompt, later_limit=560 * MIB)
    assert short["again"] == short["text"] == answer("", model, prompt=prompt)["text"] != ""
    assert short["less"] < short["held"]
    assert short["faults"] < 2000  # of 130,000 pages


def test_of_a_mixture_only_the_experts_that_are_used_are_read(
    group: Callable[[int], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, wide = 32, 8192
    e = made_families.E
    small = FAMILIES["Mixtral (a mixture of experts)"]
    shapes = small.layers(0) | {
        "ffn_gate_inp": (n, e),
        "ffn_gate_exps": (n, wide, e),
        "ffn_up_exps": (n, wide, e),
        "ffn_down_exps": (n, e, wide),
    }
    large = Family("llama", small.whole, lambda _: shapes, {"expert_count": n, "expert_used_count": 2})
    monkeypatch.setitem(FAMILIES, "large", large)
    monkeypatch.setattr(made_families, "FF", wide)
    model = make_family(tmp_path / "experts.gguf", "large")
    size = model.stat().st_size
    result = answer(group(320 * MIB), model, n_ctx=128, prompt="a")
    (warning,) = result["warnings"]
    assert "do not fit into the" in warning
    assert result["n_ctx"] == 128
    assert 0 < result["read"] < 2 * size  # in four steps, each of which reads a dense model anew
