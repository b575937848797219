"""`snapshots verify` finds bits that change while mtimes do not, as on a failing disk."""

import copy
import json
import os
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from ..conftest import flip_bit
from .conftest import MODEL, NO_AUTO_WARM, Person

pytestmark = pytest.mark.criu


@contextmanager
def decay(path: Path):
    """Flip a bit in the middle of a file during the block, without changing its times."""
    before = path.stat()

    def flip() -> None:
        flip_bit(path, before.st_size // 2)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    flip()
    try:
        yield
    finally:
        flip()


def sources(person: Person) -> dict[str, str]:
    return json.loads((person.snapshot() / "snapshot.json").read_text())["sources"]


@pytest.fixture
def own_libraries(user) -> Person:
    """A user whose virtual environment has its own copies of our libraries."""
    real, prefix = user.place.prefix, user.home / "venv"
    shutil.copytree(real / "lib/edgeinfer", prefix / "lib/edgeinfer", symlinks=True)
    (python,) = (real / "lib").glob("python3*")
    (prefix / "lib" / python.name).symlink_to(python)
    (prefix / "bin").mkdir()
    (prefix / "bin/python").symlink_to((real / "bin/python").resolve())
    shutil.copy(real / "pyvenv.cfg", prefix)
    user.place = copy.copy(user.place)
    user.place.python = prefix / "bin/python"
    user.settings(NO_AUTO_WARM)
    user.run("warm", MODEL, "--quiet").check()
    return user


def test_a_bit_of_the_model_is_found(warm):
    result = warm.run("snapshots", "verify", "--all", "--json").result
    assert result["name"] == MODEL
    assert result["files"] > len(sources(warm)) > 100
    assert result["read_bytes"] > warm.model.stat().st_size
    with decay(warm.model):
        assert warm.ask("--resume=always").code == 0, "a launch does not read the whole file"
        outcome = warm.run("snapshots", "verify", MODEL, "--json")
        assert (outcome.code, outcome.error["code"]) == (7, "snapshot-corrupt")
        assert f"{warm.model} changed since it was built" in outcome.error["message"]
    assert warm.run("snapshots", "verify", "--all").code == 0


def test_other_bits_from_the_same_files_are_found(warm):
    """Leave out the model's digest, so that only the canary can notice the change."""
    details = warm.snapshot() / "snapshot.json"
    before = details.read_text()
    details.write_text(json.dumps({**json.loads(before), "sources": {}}))
    try:
        with decay(warm.model):
            outcome = warm.run("snapshots", "verify", "--all")
    finally:
        details.write_text(before)
    assert outcome.code == 7
    assert "computes different bits than at its build" in outcome.err
    assert "suspect the disk or the memory" in outcome.err


def test_a_bit_of_a_library_is_found(own_libraries):
    (library,) = (path for path in sources(own_libraries) if "/native/libedgeinfer-kernels" in path)
    assert Path(library).is_relative_to(own_libraries.home)
    assert own_libraries.run("snapshots", "verify", "--all").code == 0
    with decay(Path(library)):
        outcome = own_libraries.run("snapshots", "verify", "--all")
    assert outcome.code == 7
    assert f"{library} changed since it was built" in outcome.err


@pytest.mark.parametrize("damaged", ["manifest", "snapshot.json", "memory.img"])
def test_a_snapshot_that_cannot_be_read_is_no_success(warm, damaged):
    path = warm.snapshot() / damaged
    before = path.read_bytes()
    path.write_bytes(before[: len(before) // 2])
    try:
        outcome = warm.run("snapshots", "verify", "--all", "--json")
    finally:
        path.write_bytes(before)
    assert (outcome.code, outcome.error["code"]) == (7, "snapshot-corrupt")
    assert f"{warm.snapshot()}" in outcome.error["message"]


def test_a_stale_snapshot_is_named_and_no_fault(warm):
    before = warm.model.stat()
    os.utime(warm.model)
    try:
        outcome = warm.run("snapshots", "verify", "--all").check()
    finally:
        os.utime(warm.model, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert f"{warm.model} was changed after the snapshot {MODEL} was made: not verified" in outcome.out


def test_a_snapshot_that_cannot_be_resumed_is_not_called_corrupt(warm):
    """Limit the address space, so that the restore fails."""
    limits = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 28,) * 2)}
    outcome = warm.run("snapshots", "verify", "--all", "--json", **limits)
    assert (outcome.code, outcome.error["code"]) == (7, "restore")
    assert "its files are as they were built" in outcome.error["hint"]


@pytest.mark.parametrize("names", [(), (MODEL, "--all")])
def test_verify_needs_names_or_all(warm, names):
    outcome = warm.run("snapshots", "verify", *names)
    assert (outcome.code, "edgeinfer snapshots verify --all" in outcome.err) == (2, True)
