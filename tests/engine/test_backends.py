"""Backend libraries as files: which one is taken, and which is never opened."""

from pathlib import Path

import msgspec
import pytest

from edgeinfer.errors import UsageError
from edgeinfer.runtime.llama import backends
from edgeinfer.runtime.llama.backends import Build, LibraryFacts

BUILD = Build(binding="0.3.36", ggml="0.25.3", commit="abc1234", machine="linux-x86_64")


def put(folder: Path, name: str = "vulkan", build: Build = BUILD, content: bytes = b"code") -> Path:
    """A library that cannot be loaded, and its JSON file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / backends.file_name(name)
    path.write_bytes(content)
    facts = LibraryFacts(name=name, build=build, sha256="0" * 64, size_bytes=len(content))
    backends.facts_path(path).write_bytes(msgspec.json.encode(facts))
    return path


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the program's own libraries, empty."""
    monkeypatch.setattr(backends, "shipped_dir", lambda: tmp_path / "shipped")
    return tmp_path / "shipped"


def test_a_vendors_own_goes_before_vulkan(shipped: Path) -> None:
    assert backends.available() == ()
    put(shipped)
    put(backends.added_dir(), "cuda")
    assert [(file.name, file.added) for file in backends.available()] == [
        ("cuda", True),
        ("vulkan", False),
    ]


def test_a_users_own_goes_before_the_programs_unless_it_is_broken(shipped: Path) -> None:
    put(shipped)
    own = put(backends.added_dir())
    assert backends.find("vulkan").path == str(own)
    own.write_bytes(b"half")
    assert backends.find("vulkan").path == str(own)  # as long as described
    own.write_bytes(b"half a library")
    assert backends.find("vulkan").path == str(shipped / own.name)


def test_a_library_of_another_llama_is_not_for_this_one(shipped: Path) -> None:
    put(shipped, build=msgspec.structs.replace(BUILD, ggml="0.24.0"))
    problem = backends.misfit(backends.find("vulkan"), BUILD)
    assert "ggml 0.24.0" in problem
    fitting = put(backends.added_dir())
    assert backends.find("vulkan", BUILD).path == str(fitting)
    assert "this is llama-cpp-python 0.3.36, ggml 0.25.3 (abc1234)" in problem


OTHERS = (("commit", "unknown", True), ("commit", "def5678", False), ("binding", "0.3.37", False))


@pytest.mark.parametrize(("field", "value", "fits"), OTHERS)
def test_what_makes_two_builds_one(field: str, value: str, fits: bool) -> None:
    other = msgspec.structs.replace(BUILD, **{field: value})
    assert BUILD.fits(other) is other.fits(BUILD) is fits


def test_library_that_another_user_may_write_to_is_not_opened(shipped: Path) -> None:
    path = put(shipped)
    path.chmod(0o666)
    assert "another user may write" in backends.misfit(backends.find("vulkan"), BUILD)
    path.chmod(0o644)
    backends.facts_path(path).unlink()
    assert "does not say which llama.cpp" in backends.misfit(backends.find("vulkan"), BUILD)


def test_a_name_that_no_backend_has(shipped: Path) -> None:
    with pytest.raises(UsageError, match="cuda, vulkan"):
        backends.find("metal")
