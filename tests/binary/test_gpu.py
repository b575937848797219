"""The Vulkan backend inside the shipped file: on the oldest libc with a loader alone, and with a device."""

import shutil
import subprocess
from pathlib import Path

import pytest

from ..conftest import BUILD_CACHE
from .conftest import Machine

LAVAPIPE = BUILD_CACHE / "lavapipe"
#: A loader of Vulkan 1.1: ggml starts and refuses it. It needs no libc.
LOADER = """
static int version(unsigned *out) { *out = 1u << 22 | 1u << 12; return 0; }
static int same(const char *a, const char *b) { while (*a && *a == *b) a++, b++; return *a == *b; }
void vkGetDeviceProcAddr(void) {}
void vkCmdCopyBuffer(void) {}
void vkGetPhysicalDeviceFeatures2(void) {}
void *vkGetInstanceProcAddr(void *instance, const char *name) {
    return same(name, "vkEnumerateInstanceVersion") ? (void *)version : 0;
}
"""


def vulkan(machine: Machine, **environment: str) -> str:
    """Return what `doctor` found of the Vulkan library."""
    checks = machine.json("doctor", **environment)["checks"]
    return next(check["found"] for check in checks if check["found"].startswith("vulkan: "))


def test_file_stays_small_with_it_inside(binary: Path) -> None:
    assert binary.stat().st_size < 60_000_000


def test_it_starts_on_the_oldest_libc_and_nothing_is_opened_without_a_loader(used: Machine) -> None:
    assert "no Vulkan loader" in vulkan(used)
    library = used.root / "usr/lib/x86_64-linux-gnu/libvulkan.so.1"
    library.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-x", "c", "-shared", "-fPIC", "-nostdlib", "-o", library, "-"]
    subprocess.run(command, input=LOADER.encode(), check=True)
    try:
        assert "no Vulkan driver has a device here" in vulkan(used)
    finally:
        library.unlink()
    licences = {component["name"] for component in used.json("version", "--licenses")["components"]}
    assert {"libvulkan-dev", "spirv-headers"} <= licences


@pytest.mark.needs("vulkan")
def test_it_finds_a_device(modern: Machine) -> None:
    shutil.copytree(LAVAPIPE, modern.root / "opt/lavapipe")
    driver = "/opt/lavapipe/lvp_icd.json"
    drivers = {"VK_DRIVER_FILES": driver, "VK_ICD_FILENAMES": driver}
    drivers |= {"LD_LIBRARY_PATH": "/opt/lavapipe/loader", "GGML_VK_VISIBLE_DEVICES": "0"}
    finding = vulkan(modern, **drivers)
    assert "llvmpipe" in finding
