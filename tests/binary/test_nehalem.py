"""On a processor of 2008 (x86-64-v2, no AVX), emulated: the application starts and picks the SSE4.2
variant.
"""

import shutil
import subprocess

import pytest

QEMU = shutil.which("qemu-x86_64")
pytestmark = pytest.mark.skipif(not QEMU, reason="qemu-user is not installed")


@pytest.fixture
def emulated(used):
    """Run the unpacked application on that processor.

    qemu emulates one process and not what that executes, so the bootloader is told that it has executed
    itself already, as it does to set LD_LIBRARY_PATH.
    """
    app = used.home / ".local/share/edgeinfer/app" / used.apps[0]
    program = str(app / "edgeinfer-app")
    environment = {
        **used.environment(),
        "HOME": str(used.home),
        "LD_LIBRARY_PATH": str(app / "_internal"),
        "_PYI_ARCHIVE_FILE": program,
        "_PYI_PARENT_PROCESS_LEVEL": "-1",
    }
    return lambda *args: subprocess.run(
        [QEMU, "-cpu", "Nehalem", program, *args],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        stdin=subprocess.DEVNULL,
    )


def test_names_its_variant(emulated):
    done = emulated("version")
    assert done.returncode == 0, done.stderr
    assert "sse42 variant" in done.stdout
