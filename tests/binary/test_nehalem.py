"""On a processor of 2008 (x86-64-v2, no AVX), emulated: the file starts, picks the SSE4.2 variant and answers."""

import os
import shutil
import subprocess

import pytest

from .conftest import MODEL

pytestmark = pytest.mark.skipif(not shutil.which("qemu-x86_64"), reason="qemu-user is not installed")


@pytest.fixture
def emulated(used):
    """How to run the unpacked application on that processor: qemu translates one process, so no launcher before it."""
    app = used.home / ".local/share/edgeinfer/app" / used.apps[0] / "edgeinfer-app"
    environment = {**used.environment(), "HOME": str(used.home), "QEMU_CPU": "Nehalem", "GOMP_SPINCOUNT": "0"}
    return lambda *args: subprocess.run(
        ["qemu-x86_64", "-cpu", "Nehalem", str(app), *args],
        env=environment, capture_output=True, text=True, check=False, timeout=500, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_names_its_variant(emulated):
    done = emulated("version")
    assert done.returncode == 0, done.stderr
    assert "sse42 variant" in done.stdout


def test_answers(emulated, used):
    if os.geteuid() == 0:
        used.run("show", MODEL)
    done = emulated("run", MODEL, "Say hi.", "--max-tokens", "2", "--threads", "2", "--ctx", "256", "--parallel", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
