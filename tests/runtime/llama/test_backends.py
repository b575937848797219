"""Backend libraries as files: which one is taken, and which is never opened."""

import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from other_processes import command_name, descendants, wait_until

from edgeinfer.cli.verbs import show
from edgeinfer.config.config_file import GpuConfig
from edgeinfer.errors import EngineError, ModelLoadError, UsageError
from edgeinfer.models import fits
from edgeinfer.platform import disk, machine, paths, process
from edgeinfer.runtime import gpu_offload
from edgeinfer.runtime.layer_plan import Device, LayerPlan
from edgeinfer.runtime.llama import backend_loading, backends, libllama
from edgeinfer.runtime.llama.backends import (
    Build,
    LibraryFacts,
    LoadedBackend,
    MissingBackend,
    OffloadRefused,
    OffloadRequest,
)
from edgeinfer.runtime.llama.weights import open_model

from ...made.made_models import make_llama
from ..test_memory_plan import DENSE, plan_of

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
def shipped_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the program's own libraries, empty."""
    monkeypatch.setattr(backends, "shipped_dir", lambda: tmp_path / "shipped")
    return tmp_path / "shipped"


def test_a_vendors_own_goes_before_vulkan(shipped_folder: Path) -> None:
    assert backends.available() == ()
    put(shipped_folder)
    put(backends.added_dir(), "cuda")
    files = [(file.name, file.added) for file in backends.available()]
    assert files == [("cuda", True), ("vulkan", False)]


def test_a_users_own_goes_before_the_programs_unless_it_is_broken(shipped_folder: Path) -> None:
    put(shipped_folder)
    user_backend = put(backends.added_dir())
    assert backends.find("vulkan").path == str(user_backend)
    user_backend.write_bytes(b"half")
    assert backends.find("vulkan").path == str(user_backend)  # as long as described
    user_backend.write_bytes(b"half a library")
    assert backends.find("vulkan").path == str(shipped_folder / user_backend.name)


def test_a_library_of_another_llama_is_not_for_this_one(shipped_folder: Path) -> None:
    put(shipped_folder, build=replace(BUILD, ggml="0.24.0"))
    problem = backends.misfit(backends.find("vulkan"), BUILD)
    assert "ggml 0.24.0" in problem
    fitting = put(backends.added_dir())
    assert backends.find("vulkan", BUILD).path == str(fitting)
    assert "this is llama-cpp-python 0.3.36, ggml 0.25.3 (abc1234)" in problem


OTHERS = (("commit", "unknown", True), ("commit", "def5678", False), ("binding", "0.3.37", False))


@pytest.mark.parametrize(("field", "value", "fits"), OTHERS)
def test_what_makes_two_builds_one(field: str, value: str, fits: bool) -> None:
    other = replace(BUILD, **{field: value})
    assert BUILD.fits(other) is other.fits(BUILD) is fits


def test_library_that_another_user_may_write_to_is_not_opened(shipped_folder: Path) -> None:
    path = put(backends.added_dir())
    path.chmod(0o666)
    assert "other users can write" in backends.misfit(backends.find("vulkan"), BUILD)
    path.chmod(0o644)
    backends.facts_path(path).unlink()
    assert "does not say which llama.cpp" in backends.misfit(backends.find("vulkan"), BUILD)


@pytest.fixture
def added() -> Path:
    """A library that the user added, in folders with the strictest permissions."""
    path = put(backends.added_dir(), "cuda")
    for location in (path, *path.parents):
        if location == paths.data_dir().parent:
            return path
        location.chmod(0o700)
    raise AssertionError


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o775, 0o702, 0o1777])
@pytest.mark.parametrize("depth", range(4))
def test_who_may_write_to_a_library_or_a_folder_above_it(added: Path, mode: int, depth: int) -> None:
    location = (added, *added.parents)[depth]
    location.chmod(mode)
    is_exposed = mode & 0o022 and not (mode & stat.S_ISVTX)
    file = backends.read("cuda", added, added=True)
    assert (f"group or other users can write to {location}," in file.problem) == bool(is_exposed)
    assert is_exposed or not file.problem
    assert not is_exposed or file.fix == f"chmod go-w {location}"


@pytest.mark.parametrize("owner", ["stranger", "the owner of /"])
@pytest.mark.parametrize("depth", range(4))
def test_file_or_folder_of_another_user_is_exposed(
    added: Path, monkeypatch: pytest.MonkeyPatch, depth: int, owner: str
) -> None:
    location, real = str((added, *added.parents)[depth]), os.stat
    others = [location, *(["/"] if owner == "the owner of /" else [])]

    def owned(path: str, *more: object, **named: Any) -> os.stat_result:
        info = real(path, *more, **named)
        uid = 65_534 if path in others else info.st_uid
        return os.stat_result([*info[:4], uid, *info[5:]])

    monkeypatch.setattr(os, "stat", owned)
    file = backends.read("cuda", added, added=True)
    if owner == "stranger":
        assert file.problem.startswith(f"{location} belongs to another user")
        assert "EDGEINFER_HOME" in file.fix
    else:
        assert not file.problem


def test_other_library_in_the_folder_is_checked_too(added: Path) -> None:
    other = added.with_name("libvulkan.so.1")
    other.touch(0o600)
    other.with_name("libbroken.so").symlink_to("nowhere")
    assert backends.read("cuda", added, added=True).problem == ""
    other.chmod(0o666)
    assert str(other) in backends.read("cuda", added, added=True).problem


def test_target_of_a_link_is_checked_too(added: Path, tmp_path: Path) -> None:
    target = tmp_path / "open" / added.name
    target.parent.mkdir()
    added.rename(target)
    added.symlink_to(target)
    assert backends.read("cuda", added, added=True).problem == ""
    target.parent.chmod(0o777)
    assert str(target.parent) in backends.read("cuda", added, added=True).problem


STEPS = {
    "exposed": (backends, "refuse_exposed"),
    "description": (disk, "read_regular"),
    "stamps": (disk, "stamps"),
    "digest": (backend_loading, "sha256_of"),
    "loading": (backend_loading, "_load"),
}


@pytest.mark.parametrize("victim", ["library", "description"])
@pytest.mark.parametrize("step", STEPS)
def test_file_that_vanishes_between_two_calls_is_a_reason(
    shipped_folder: Path, added: Path, monkeypatch: pytest.MonkeyPatch, step: str, victim: str
) -> None:
    path = added if victim == "library" else backends.facts_path(added)
    module, name = STEPS[step]
    call = getattr(module, name)

    def vanish(*arguments: object, **named: object) -> object:
        path.unlink(missing_ok=True)
        return call(*arguments, **named)

    monkeypatch.setattr(module, name, vanish)
    monkeypatch.setattr(backend_loading, "this_build", lambda: BUILD)
    answer = backend_loading.load("cuda")
    assert isinstance(answer, MissingBackend)
    assert answer.reason


@pytest.mark.parametrize("name", backends.NAMES)
@pytest.mark.parametrize("machine", ["linux-x86_64", "linux-aarch64"])
@pytest.mark.parametrize("has_key", [True, False])
def test_the_verb_is_named_where_it_can_install(
    monkeypatch: pytest.MonkeyPatch, name: str, machine: str, has_key: bool
) -> None:
    monkeypatch.setattr(backends, "this_machine", lambda: machine)
    monkeypatch.setattr(backends, "has_release_key", lambda: has_key)
    can_install = name == "cuda" and machine == "linux-x86_64" and has_key
    assert ("backend install" in backends.how_to_add(name)) is can_install
    assert ("make gpu" in backends.how_to_add(name)) is (name == "vulkan")


def test_a_checkout_has_no_release_key() -> None:
    assert not backends.has_release_key()


def test_a_name_that_no_backend_has(shipped_folder: Path) -> None:
    with pytest.raises(UsageError, match="metal") as refused:
        backends.find("metal")
    assert refused.value.hint == "use cuda or vulkan"


GIB = 1 << 30
RTX, RTX_2, IRIS, ARC, MESA, NPU = (
    Device(name=f"Vulkan{i}", description="", kind=kind, backend="vulkan", free_bytes=7 * GIB)  # type: ignore[arg-type]
    for i, kind in enumerate("gpu gpu integrated integrated software accelerator".split())
)


@pytest.mark.parametrize("layers", ["auto", "all", 5])
@pytest.mark.parametrize(
    ("devices", "chosen"),
    [
        ((IRIS, RTX, MESA, NPU), (RTX,)),
        ((RTX, IRIS, ARC, RTX_2), (RTX, RTX_2)),
        ((MESA, IRIS, NPU), (IRIS,)),
        ((IRIS, ARC), (IRIS, ARC)),
    ],
)
def test_integrated_devices_get_layers_only_where_no_card_is(
    layers: int | str, devices: tuple[Device, ...], chosen: tuple[Device, ...]
) -> None:
    assert OffloadRequest(layers=layers).choose(devices) == chosen


def test_an_integrated_device_is_used_beside_a_card_if_it_is_named() -> None:
    request = OffloadRequest(devices=("Vulkan2", "Vulkan0"))
    assert request.choose((RTX, IRIS)) == (RTX, IRIS)


def test_software_devices_are_used_only_for_requested_layers() -> None:
    assert OffloadRequest().choose((MESA,)) == ()
    assert OffloadRequest(layers=1).choose((MESA,)) == (MESA,)


@pytest.mark.parametrize(
    ("lengths", "devices", "is_slow"),
    [
        ((128, 128), ("CUDA0",), False),
        ((160, 160), ("CUDA0",), True),
        ((160, 160), ("Vulkan0",), False),
        ((48, 48), (), False),
    ],
)
def test_heads_that_cuda_has_no_attention_for_are_named(
    lengths: tuple[int, ...], devices: tuple[str, ...], is_slow: bool
) -> None:
    shape = replace(DENSE, head_lengths=lengths)
    layer_plan = LayerPlan(n_layers=len(devices), n_all=33, reason="", devices=devices)
    assert (f"heads of {lengths[0]}" in show.attention_note(shape, layer_plan)) == is_slow
    assert show.attention_note(shape, None) == ""


ASK = backends.ask
FILES = tuple(backends.BackendFile(name=n, path="/nowhere", added=n == "cuda") for n in backends.NAMES)
Outcomes = dict[str, backends.BackendOutcome]


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> Outcomes:
    """Install both backends, which do what this says, on a machine that may have a GPU."""
    crashed = (MissingBackend(name=name, reason="its process crashed") for name in backends.NAMES)
    outcomes: Outcomes = dict(zip(backends.NAMES, crashed, strict=True))
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(libllama, "guard_calls", lambda: None)  # it cannot be undone
    monkeypatch.setattr(backends, "available", lambda: FILES)
    monkeypatch.setattr(backends, "ask", lambda name, _stop=None: outcomes[name])
    monkeypatch.setattr(backend_loading, "load", lambda name, _tried: outcomes[name])
    return outcomes


@pytest.mark.parametrize(
    ("cuda", "vulkan", "expected"),
    [
        ((RTX,), (RTX_2,), (RTX,)),
        ((), (RTX_2,), (RTX_2,)),
        ((MESA,), (IRIS, RTX_2), (RTX_2,)),
        ((MESA,), (IRIS,), (IRIS,)),
        ((MESA,), (), ()),
    ],
)
def test_show_fits_and_a_launch_use_the_first_backend_with_chosen_devices(
    outcomes: Outcomes, cuda: Any, vulkan: Any, expected: tuple[Device, ...]
) -> None:
    for file, devices in zip(FILES, (cuda, vulkan), strict=True):
        if devices:
            outcomes[file.name] = LoadedBackend(file=file, devices=devices)
    layer_plan = show._plan_layers(DENSE, plan_of(DENSE), "auto", GpuConfig())
    assert layer_plan is not None
    assert layer_plan.devices == tuple(device.name for device in expected)
    assert fits.cards.__wrapped__() == tuple(device for device in expected if device.kind == "gpu")
    launched = backends.find_devices(OffloadRequest(), backend_loading.load_after_probe)
    if expected:
        assert next(launched) == expected
        return
    with pytest.raises(OffloadRefused, match="vulkan: its process crashed") as refused:
        next(launched)
    assert str(layer_plan) == f"none: {refused.value}"


def test_missing_device_is_named_with_its_key(outcomes: Outcomes) -> None:
    outcomes[FILES[0].name] = LoadedBackend(file=FILES[0], devices=(RTX,))
    request = OffloadRequest(devices=("Vulkan9",))
    with pytest.raises(OffloadRefused, match=r"no device Vulkan9 \(`gpu.devices` in config.toml\)"):
        list(backends.find_devices(request, backend_loading.load_after_probe))


def test_library_that_crashes_in_another_process_is_not_opened(
    outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_loading, "load", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(OffloadRefused, match="crashed"):
        list(backends.find_devices(OffloadRequest(), backend_loading.load_after_probe))


@pytest.mark.parametrize(("layers", "has_gpu"), [("none", True), (0, True), ("auto", False)])
def test_nothing_is_started_without_a_gpu_or_for_no_layers(
    outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch, layers: int | str, has_gpu: bool
) -> None:
    monkeypatch.setattr(machine, "has_gpu", lambda: has_gpu)
    outcomes.clear()  # asking fails
    offloader = gpu_offload.GpuOffloader(*[None] * 9)  # type: ignore[arg-type]
    offloader.begin(OffloadRequest(layers=layers))
    assert offloader._thread is None
    assert show._plan_layers(DENSE, plan_of(DENSE), layers, GpuConfig()) is None


def test_engine_that_closes_does_not_wait_for_a_library_that_hangs(
    outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backends, "ask", ASK)
    monkeypatch.setattr(backends, "_PATIENCE_S", 3600.0)
    monkeypatch.setattr(process, "child_command", lambda *_: ["sleep", "3600"])
    offloader = gpu_offload.GpuOffloader(*[None] * 9)  # type: ignore[arg-type]
    offloader.cpu = SimpleNamespace(choices={})  # type: ignore[assignment]
    offloader.begin(OffloadRequest(layers="all"))
    wait_until(lambda: "sleep" in map(command_name, descendants(os.getpid())), "the process to hang")
    assert offloader.stop()
    offloader.close()
    assert offloader.wait(0.0)
    assert caplog.text == "", "the end is not a failure"


def test_load_is_stopped_by_its_progress(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "tiny.gguf", 512)
    with pytest.raises(ModelLoadError):
        open_model((str(path),), lambda *_: False)


@pytest.mark.parametrize(
    ("message", "is_short"),
    [
        ("unable to allocate Vulkan0 buffer", True),
        ("vk::Device::allocateMemory: ErrorOutOfDeviceMemory", True),
        ("cudaMalloc failed: out of memory", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("vk::Queue::submit: ErrorDeviceLost", False),
        ("llama.cpp could not load /home/me/memory/x.gguf", False),
    ],
)
def test_only_a_device_that_is_full_is_used_again(message: str, is_short: bool) -> None:
    assert gpu_offload._is_short_of_memory(EngineError(message)) == is_short
