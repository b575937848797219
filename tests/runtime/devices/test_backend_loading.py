"""Backend libraries loaded for real, each in a process of its own, on Mesa's software device."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from made_models import make_llama
from msgspec.structs import replace
from other_processes import run, run_python

from edgeinfer.runtime.llama import backends
from edgeinfer.runtime.llama.backends import LibraryFacts

from ...conftest import ROOT

#: What `make cuda` leaves; EDGEINFER_CUDA_LIBRARY names another.
CUDA = Path(os.environ.get("EDGEINFER_CUDA_LIBRARY") or ROOT / "dist/backends/libggml-cuda.so")
#: What ggml calls of NVIDIA's driver.
DRIVER = """
    DeviceGet DeviceGetAttribute GetErrorString MemAddressFree MemAddressReserve MemCreate
    MemGetAllocationGranularity MemMap MemRelease MemSetAccess MemUnmap
""".split()
#: Prints what loading gives, and what of it the process then maps.
LOAD = """
import json, sys
from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.llama import backend_loading
import msgspec
from msgspec.structs import replace
libllama.lib()
if sys.argv[1] == "cuda":  # one that lies with the program is not looked at
    backend_loading.backends.shipped_dir = lambda: backend_loading.Path("/nowhere")
mapped = lambda: [w for w in ("libggml-", "libvulkan") if w in open("/proc/self/maps").read().replace("libggml-base", "").replace("libggml-cpu", "")]
before = mapped()
first, second = backend_loading.load(sys.argv[1]), backend_loading.load(sys.argv[1])
same = getattr(first, "devices", ()) == getattr(second, "devices", ())
print(msgspec.json.encode({"answer": first, "before": before, "after": mapped(), "same": same}).decode())
"""


def load(name: str, **more: str):
    """Run `backend_loading.load` in a fresh process with more in its environment."""
    said = run_python(LOAD, name, env={**os.environ, **more}, timeout=120)
    return json.loads(said.splitlines()[-1])


def test_device_is_described_and_not_opened_before(lavapipe: dict[str, str]) -> None:
    found = load("vulkan", **lavapipe, GGML_VK_VISIBLE_DEVICES="0")
    assert found["before"] == []
    assert found["after"] == ["libggml-", "libvulkan"]
    (device,) = found["answer"]["devices"]
    assert device["name"] == "Vulkan0"
    assert device["kind"] == "software"
    assert "llvmpipe" in device["description"]
    assert 0 < device["free_bytes"] <= device["total_bytes"]
    assert device["pointer"]
    assert found["same"]


def test_missing_device_is_explained(lavapipe: dict[str, str]) -> None:
    software = load("vulkan", **lavapipe)["answer"]
    none = load("vulkan", **lavapipe | dict.fromkeys(("VK_DRIVER_FILES", "VK_ICD_FILENAMES"), "/none"))
    for answer in (software, none["answer"]):
        assert answer["reason"] == "no Vulkan driver has a device here"
        assert answer["absent"]


def library(folder: Path, name: str, needs: str, code: str) -> Path:
    """A stand-in for the library of a backend, linked with `needs`."""
    own = backends.find("vulkan")
    assert own, "no Vulkan backend is here: run scripts/setup.sh"
    build = own.facts.build
    folder.mkdir(parents=True, exist_ok=True)
    stub = folder / "stub.so"
    compiler = ["gcc", "-x", "c", "-shared", "-fPIC"]
    subprocess.run([*compiler, f"-Wl,-soname,{needs}", "-o", stub, "-"], input=b"int f;", check=True)
    out = folder / backends.file_name(name)
    link = ["-x", "none", "-Wl,--no-as-needed", stub]
    subprocess.run([*compiler, "-o", out, "-", *link], input=code.encode(), check=True)
    stub.unlink()
    facts = LibraryFacts(name=name, build=build, sha256="", size_bytes=out.stat().st_size)
    backends.facts_path(out).write_bytes(msgspec.json.encode(facts))
    return out


@pytest.mark.needs("vulkan")
def test_cuda_is_absent_without_the_driver() -> None:
    # by a name that no machine has, also one with the driver
    needs, code = "libcuda.so.1.absent", "void *ggml_backend_init(void) { return 0; }"
    library(backends.added_dir(), "cuda", needs, code)
    answer = load("cuda")["answer"]
    assert answer["reason"] == "there is no NVIDIA driver (libcuda.so.1)"
    assert answer["absent"]


def test_the_real_cuda_library_finds_nothing_where_the_driver_is_a_stub(tmp_path: Path) -> None:
    if not CUDA.is_file():
        pytest.skip("CUDA's library is not built here: make cuda")
    backends.added_dir().mkdir(parents=True)
    for path in (CUDA, backends.facts_path(CUDA)):
        (backends.added_dir() / path.name).symlink_to(path)
    stub = "".join(f"void cu{name}(void) {{}}\n" for name in DRIVER)
    driver = ["gcc", "-x", "c", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", "-"]
    subprocess.run(driver, input=stub.encode(), check=True)
    found = load("cuda", LD_LIBRARY_PATH=str(tmp_path))
    assert found["answer"]["reason"] == "the NVIDIA driver is too old for this library"
    assert found["after"] == ["libggml-"]


@pytest.mark.needs("vulkan")
def test_a_library_of_another_build_is_never_opened() -> None:
    out = library(backends.added_dir(), "cuda", "libc.so.6", "int f;")
    facts = msgspec.json.decode(backends.facts_path(out).read_bytes(), type=LibraryFacts)
    build = replace(facts.build, ggml="0.1.0")
    facts = replace(facts, build=build)
    backends.facts_path(out).write_bytes(msgspec.json.encode(facts))
    found = load("cuda")
    assert "was built for" in found["answer"]["reason"]
    assert "ggml 0.1.0" in found["answer"]["reason"]
    assert not found["answer"]["absent"]
    assert found["after"] == []


@pytest.mark.needs("vulkan")
def test_library_with_another_digest_than_its_description_is_never_opened() -> None:
    out = library(backends.added_dir(), "cuda", "libc.so.6", "int f;")
    facts = msgspec.json.decode(backends.facts_path(out).read_bytes(), type=LibraryFacts)
    facts = replace(facts, sha256="0" * 64)
    backends.facts_path(out).write_bytes(msgspec.json.encode(facts))
    found = load("cuda")
    assert found["answer"]["reason"] == "its SHA-256 is not the one that libggml-cuda.json has"
    assert found["after"] == []
    digest = hashlib.sha256(out.read_bytes()).hexdigest()
    facts = replace(facts, sha256=digest)
    backends.facts_path(out).write_bytes(msgspec.json.encode(facts))
    assert "SHA-256" not in load("cuda")["answer"]["reason"]


@pytest.mark.needs("vulkan")
def test_driver_that_prints_and_leaves_a_process_does_not_spoil_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "_PATIENCE_S", 3600.0)
    monkeypatch.setenv("DAEMON", str(tmp_path / "pid"))
    code = """
        #include <stdio.h>
        #include <stdlib.h>
        #include <unistd.h>
        void *ggml_backend_init(void) {
            FILE *file = fopen(getenv("DAEMON"), "w");
            int pid = fork();
            while (!pid) pause();
            fprintf(file, "%d", pid);
            fclose(file);
            write(1, "{}", 2);
            return 0;
        }
    """
    library(backends.added_dir(), "cuda", "libc.so.6", code)
    try:
        assert backends.ask("cuda").reason == "its driver could not start"
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


#: Prints why a launch uses no device.
FIND_DEVICES = """
from edgeinfer.runtime.llama import backend_loading, backends, libllama
libllama.lib()
backends.shipped_dir = lambda: backends.Path("/nowhere")
backends._PATIENCE_S = 5.0
try:
    print(*backends.find_devices(backends.OffloadRequest(layers="all"), backend_loading.load_after_probe))
except backends.OffloadRefused as error:
    print(error)
"""


#: Prints whether the launch itself reads the added library for its digest: as it was tried, and changed after.
HASHES = """
import os
from edgeinfer.runtime.llama import backend_loading, backends, libllama
libllama.lib()
backends.shipped_dir = lambda: backends.Path("/nowhere")
backends._PATIENCE_S = 120.0
hashed, sha256_of, ask = [], backend_loading.sha256_of, backends.ask
backend_loading.sha256_of = lambda path: hashed.append(path) or sha256_of(path)
def ask_and_change(name, stop):
    answer = ask(name, stop)
    os.utime(answer.file.path, (0, 0))
    return answer
for backends.ask in (ask_and_change, ask):
    found = list(backends.find_devices(backends.OffloadRequest(layers="all"), backend_loading.load_after_probe))
    print(len(found), len(hashed))
    hashed.clear()
    backend_loading._handles.clear()
"""


def test_an_added_library_is_hashed_once_for_a_launch(lavapipe: dict[str, str]) -> None:
    own = Path(backends.find("vulkan").path)
    backends.added_dir().mkdir(parents=True, mode=0o700)
    for path in (own, backends.facts_path(own)):
        shutil.copy(path, backends.added_dir())
    environment = {**os.environ, **lavapipe, "GGML_VK_VISIBLE_DEVICES": "0"}
    said = run_python(HASHES, env=environment, timeout=240)
    assert said.split() == ["1", "1", "1", "0"]


@pytest.mark.needs("vulkan")
@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("*(volatile int *)0 = 1;", "cuda: the process that loaded it ended with SIGSEGV"),
        ("for (;;) pause();", "cuda: the process that loaded it took more than 5 s"),
    ],
)
def test_an_added_library_that_crashes_or_hangs_leaves_the_launch_on_the_cpu(
    code: str, outcome: str
) -> None:
    start = f"#include <unistd.h>\n__attribute__((constructor)) void start(void) {{ {code} }}"
    library(backends.added_dir(), "cuda", "libc.so.6", start)
    assert outcome in run_python(FIND_DEVICES, timeout=120)


#: Closes an engine while a driver hangs that answered when it was tried, then lets the driver answer.
HANGING_DRIVER = """
import os, sys, threading
from pathlib import Path
from edgeinfer.runtime import engine as engines
from edgeinfer.runtime.layer_plan import Device
from edgeinfer.runtime.llama import backends
from edgeinfer.runtime.options import LoadOptions, ModelFiles
backends.shipped_dir = lambda: Path("/nowhere")
device = Device(name="CUDA0", description="a card", kind="gpu", backend="cuda")
backends.ask = lambda name, stop: backends.LoadedBackend(file=backends.find(name), devices=(device,))
engines._DRIVER_PATIENCE_S = 0.5
files = ModelFiles(name="m", paths=(sys.argv[1],))
engine = engines.load_engine(files, LoadOptions(n_ctx=256, n_parallel=1))
engine.attach_devices(backends.OffloadRequest(layers="all"))
Path(os.environ["HANGS"]).read_bytes()  # waits until the driver opens it
engine.close()
(thread,) = [thread for thread in threading.enumerate() if thread.name == "edgeinfer-free"]
print("closed", bool(engine._loaded.model))
Path(os.environ["ANSWERS"]).write_bytes(b"")
thread.join(60)
print("freed", not engine._loaded.model)
"""


@pytest.mark.needs("vulkan")
def test_engine_closes_while_a_driver_hangs_and_is_freed_once_it_answers(tmp_path: Path) -> None:
    fifos = {name: str(tmp_path / name) for name in ("HANGS", "ANSWERS")}
    for path in fifos.values():
        os.mkfifo(path)
    code = """
        #include <stdio.h>
        #include <stdlib.h>
        void *ggml_backend_init(void) {
            fclose(fopen(getenv("HANGS"), "w"));
            fclose(fopen(getenv("ANSWERS"), "r"));
            return 0;
        }
    """
    library(backends.added_dir(), "cuda", "libc.so.6", code)
    model = make_llama(tmp_path / "tiny.gguf", 256)
    done = run(sys.executable, "-c", HANGING_DRIVER, model, env={**os.environ, **fifos}, timeout=120)
    assert done.stdout.splitlines() == ["closed True", "freed True"]
    assert "a GPU does not answer: m stays in memory until it does" in done.stderr
