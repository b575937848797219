"""One snapshot that knows no device, resumed with one and without: Mesa's software device after a real restore."""

import shutil
from pathlib import Path

import pytest
from other_processes import wait_until

from edgeinfer.runtime.llama import backends

from ..conftest import BUILD_CACHE
from .conftest import MODEL, Endpoint, Person, _is_world_accessible

pytestmark = [pytest.mark.criu, pytest.mark.needs("vulkan")]

LAVAPIPE = BUILD_CACHE / "lavapipe"
PATIENCE_S = 240


@pytest.fixture
def device(warm: Person) -> dict[str, str]:
    """The environment in which this person's Vulkan backend finds the software device.

    The loader is next to the backend: LD_LIBRARY_PATH would reach a resumed process too late.
    """
    file = backends.find("vulkan")
    if file is None:
        pytest.skip("no Vulkan backend was built: the set-up needs apt for its shader compiler")
    driver = LAVAPIPE
    if not _is_world_accessible(driver):
        driver = warm.place.folder / "lavapipe"
        shutil.copytree(LAVAPIPE, driver, dirs_exist_ok=True)
    shaders = warm.home / "shaders"
    shaders.mkdir(exist_ok=True)
    compiled = BUILD_CACHE / "lavapipe-shaders"  # tests of the engine may have compiled them
    if compiled.is_dir():
        shutil.copytree(compiled, shaders, dirs_exist_ok=True)
    folder = warm.data / "data/backends"
    folder.mkdir(exist_ok=True)
    library = Path(file.path)
    for path in (library, backends.facts_path(library), driver / "loader/libvulkan.so.1"):
        shutil.copy(path, folder)
    for path in (folder, *folder.iterdir(), shaders, *shaders.rglob("*")):
        shutil.chown(path, warm.uid, warm.gid)
    return {
        "VK_DRIVER_FILES": str(driver / "lvp_icd.json"),
        "VK_ICD_FILENAMES": str(driver / "lvp_icd.json"),
        "GGML_VK_VISIBLE_DEVICES": "0",
        "MESA_SHADER_CACHE_DIR": str(shaders),
    }


def place(endpoint: Endpoint) -> str:
    """Return on which devices the layers are, as the endpoint reports it."""
    model = endpoint.props
    loaded = model["state"] == "loaded"
    return str(model["info"]["choices"]["gpu_layers"]["value"]) if loaded else "none"


def on_device(endpoint: Endpoint) -> str:
    """Wait until layers are on a device; return where they are."""

    def place_of_layers() -> str:
        assert endpoint.process.poll() is None, endpoint.log.read_text()
        return place(endpoint).replace("none", "")

    return wait_until(place_of_layers, "a device", PATIENCE_S)


def mapped_files(endpoint: Endpoint) -> str:
    """Return the files that the resumed process has mapped."""
    (pid,) = endpoint.apps()
    return Path(f"/proc/{pid}/maps").read_text()


def test_one_snapshot_without_a_gpu_library_serves_every_number_of_layers(warm):
    (files,) = warm.snapshot().rglob("files.img")
    opened = files.read_bytes()
    assert b"libllama" in opened
    for name in (b"libggml-vulkan", b"libvulkan", b"libcuda", b"libdrm", b"/dev/dri", b"/dev/nvidia"):
        assert name not in opened
    texts = set()
    for layers in ("auto", "none", "all", "2"):
        outcome = warm.ask("--gpu-layers", layers, "--resume=always")
        assert outcome.start["how"] == "resumed"
        texts.add(outcome.result["text"])
    assert len(texts) == 1


def test_one_snapshot_is_resumed_with_a_device_and_without(
    warm: Person, device: dict[str, str]
) -> None:
    snapshot = warm.snapshot()
    texts = set()
    for layers in ("2", "none"):
        command = (MODEL, "--gpu-layers", layers, "--resume=always")
        with Endpoint(warm, *command, env=device) as endpoint:
            if layers == "2":
                assert on_device(endpoint) == "2 of 31 on Vulkan0"
                assert f"{MODEL}: layers on GPUs: 2 of 31 on Vulkan0" in warm.run("ps").out
            body = {"model": MODEL, "prompt": "1, 2, 3, 4, 5,", "max_tokens": 6, "temperature": 0}
            texts.add(endpoint.post(body)["choices"][0]["text"])
            assert (place(endpoint) == "none") == (layers == "none")
            assert ("libvulkan_lvp" in mapped_files(endpoint)) == (layers == "2")
    assert len(texts) == 1
    assert warm.snapshot() == snapshot
