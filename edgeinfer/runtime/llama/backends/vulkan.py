"""Ask the Vulkan loader for this machine's devices, their kinds and drivers, or why there are none.

ggml names its devices without drivers, leaves software devices out, and returns NULL for any missing
part. This asks the loader itself, before ggml does, and closes what it opened. The layouts and numbers
are those of vulkan_core.h; only functions of Vulkan 1.1 are called.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from glob import glob

import msgspec

LOADER = "libvulkan.so.1"
#: VkPhysicalDeviceType.
_KINDS = {1: "integrated", 2: "gpu", 3: "gpu", 4: "software"}
_API_1_1 = 1 << 22 | 1 << 12
_NO_DRIVER = -9  # VK_ERROR_INCOMPATIBLE_DRIVER
_PROPERTIES_2 = 1000059001
_DRIVER_PROPERTIES = 1000196000
_U32 = ctypes.c_uint32


class VulkanDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device as its driver describes it. `kind` is one of `devices.Kind`."""

    name: str
    kind: str
    driver: str


class VulkanProbe(msgspec.Struct, frozen=True, kw_only=True):
    """The result: `devices`, or a `problem` and the command that helps."""

    devices: tuple[VulkanDevice, ...] = ()
    problem: str = ""
    fix: str = ""


class _Application(ctypes.Structure):
    _fields_ = (
        ("type", _U32),
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("version", _U32),
        ("engine", ctypes.c_char_p),
        ("engine_version", _U32),
        ("api_version", _U32),
    )


class _InstanceInfo(ctypes.Structure):
    _fields_ = (
        ("type", _U32),
        ("next", ctypes.c_void_p),
        ("flags", _U32),
        ("application", ctypes.POINTER(_Application)),
        ("n_layers", _U32),
        ("layers", ctypes.c_void_p),
        ("n_extensions", _U32),
        ("extensions", ctypes.c_void_p),
    )


class _Driver(ctypes.Structure):
    _fields_ = (
        ("type", _U32),
        ("next", ctypes.c_void_p),
        ("id", _U32),
        ("name", ctypes.c_char * 256),
        ("info", ctypes.c_char * 256),
        ("conformance", ctypes.c_uint8 * 4),
    )


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", _U32),
        ("next", ctypes.c_void_p),
        ("api_version", _U32),
        ("driver_version", _U32),
        ("vendor", _U32),
        ("device", _U32),
        ("kind", _U32),
        ("name", ctypes.c_char * 256),
        ("rest", ctypes.c_uint64 * 96),  # limits and sparse properties take 548 bytes
    )


def probe(folder: str) -> VulkanProbe:
    """Ask the loader for every device. The drivers open theirs: the process cannot be dumped after it.

    A loader in `folder`, beside the backend library, is preferred to the system's.
    """
    beside = os.path.join(folder, LOADER)
    try:
        library = ctypes.CDLL(beside if os.path.isfile(beside) else LOADER)
        return _ask(library)
    except (OSError, AttributeError):  # AttributeError: a loader without Vulkan 1.1
        fix = "install the Vulkan loader: apt-get install libvulkan1, or dnf install vulkan-loader"
        return VulkanProbe(problem=f"there is no Vulkan loader ({LOADER})", fix=fix)


def _ask(library: ctypes.CDLL) -> VulkanProbe:
    with _instance(library) as (instance, result):
        if result == _NO_DRIVER:
            return _no_driver()
        if result:
            return VulkanProbe(problem=f"the Vulkan loader could not start: VkResult {result}")
        devices = tuple(_devices(library, instance))
        return VulkanProbe(devices=devices) if devices else _no_driver()


def _no_driver() -> VulkanProbe:
    nodes = sorted(glob("/dev/dri/renderD*"))
    closed = [node for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    if closed:
        fix = "sudo usermod -aG render,video $USER, and log in again"
        return VulkanProbe(problem=f"this user may not open {closed[0]}", fix=fix)
    fix = "for AMD and Intel: apt-get install mesa-vulkan-drivers; for NVIDIA: its own driver"
    return VulkanProbe(problem="no Vulkan driver has a device here", fix=fix)


@contextlib.contextmanager
def _instance(library: ctypes.CDLL) -> Iterator[tuple[ctypes.c_void_p, int]]:
    application = _Application(name=b"edgeinfer", api_version=_API_1_1)
    info = _InstanceInfo(type=1, application=ctypes.pointer(application))
    instance = ctypes.c_void_p()
    result = int(library.vkCreateInstance(ctypes.byref(info), None, ctypes.byref(instance)))
    try:
        yield instance, result
    finally:
        if not result:
            library.vkDestroyInstance(instance, None)


def _devices(library: ctypes.CDLL, instance: ctypes.c_void_p) -> Iterator[VulkanDevice]:
    count = _U32(64)
    handles = (ctypes.c_void_p * count.value)()
    if library.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), handles) < 0:
        return
    for handle in handles[: count.value]:
        driver = _Driver(type=_DRIVER_PROPERTIES)
        found = _Properties(type=_PROPERTIES_2, next=ctypes.addressof(driver))
        library.vkGetPhysicalDeviceProperties2(ctypes.c_void_p(handle), ctypes.byref(found))
        yield VulkanDevice(
            name=found.name.decode("utf-8", "replace"),
            kind=_KINDS.get(found.kind, "accelerator"),
            driver=f"{driver.name.decode('utf-8', 'replace')} {driver.info.decode('utf-8', 'replace')}",
        )
