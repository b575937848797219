"""On a processor of 2008 (x86-64-v2, no AVX), emulated: the application starts and picks the SSE4.2
variant.
"""

import shutil
import subprocess

import pytest
from other_processes import run

QEMU = shutil.which("qemu-x86_64")
pytestmark = pytest.mark.skipif(not QEMU, reason="qemu-user is not installed")


@pytest.fixture
def old_processor(used):
    """The command that runs the unpacked application on that processor, and its environment.

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
    return [QEMU, "-cpu", "Nehalem", program], environment


def test_names_its_variant(old_processor):
    command, environment = old_processor
    done = run(*command, "version", env=environment, timeout=500, stdin=subprocess.DEVNULL)
    assert "sse42 variant" in done.stdout
