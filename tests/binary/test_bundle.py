"""A file with a model inside: opens a chat on a machine without a network, and its weights are in the
store once.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgeinfer.shipping.payload import open_shipped

from ..conftest import flip_bit
from .conftest import MODEL, PROGRAM, Machine
from .test_bare_machine import ASK

BUILD = Path(__file__).parents[2] / "build"


@pytest.fixture(scope="module")
def bundled_program(binary, smollm2, tmp_path_factory):
    """The shipped file with the small model inside, as `make binary MODEL=` writes it."""
    folder = tmp_path_factory.mktemp("bundled")
    environment = {**os.environ, "EDGEINFER_HOME": str(folder / "home"), "PYTHONPATH": str(BUILD)}
    program = Path(sys.executable).with_name("edgeinfer")
    pull = [program, "pull", smollm2, "--name", MODEL, "--quiet"]
    subprocess.run(pull, env=environment, check=True)
    code = "import sys, pathlib, release; release.bundle(pathlib.Path(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3]))"
    out = folder / "with-model"
    subprocess.run([sys.executable, "-c", code, binary, MODEL, out], env=environment, check=True)
    return out


def test_its_size_is_the_files_and_the_models(bundled_program, binary, smollm2):
    both = binary.stat().st_size + smollm2.stat().st_size
    assert both <= bundled_program.stat().st_size <= both + (1 << 20)
    assert open_shipped(bundled_program).app == open_shipped(binary).app


def test_answers_on_a_machine_without_a_network(bundled_program, tmp_path):
    machine = Machine(tmp_path / "root", bundled_program)
    first = machine.run("run", *ASK[2:], "--resume", "never", options=("--no-network",))
    assert first.stdout.strip()
    weights = list(machine.home.rglob("*.gguf"))
    assert len(weights) == 1
    again = machine.run(*ASK, "--resume", "never", options=("--no-network",))
    assert (again.stdout, "first start" in again.stderr) == (first.stdout, False)
    assert machine.json("doctor", "--verify")["findings"] == []


def test_damaged_model_is_refused_and_nothing_is_stored(bundled_program, tmp_path):
    machine = Machine(tmp_path / "root", bundled_program)
    shipped = open_shipped(bundled_program)
    flip_bit(machine.root / PROGRAM[1:], shipped.bundle_offset + shipped.bundle_length // 2)
    done = machine.run("list", check=False)
    assert done.returncode == 5
    assert "damaged" in done.stderr
    assert list(machine.home.rglob("*.gguf")) == []
