"""The shipped file's process takes the system's C++ library where it is newer than its own."""

import subprocess
from pathlib import Path

import pytest
from other_processes import run_python

CHILD = """
import sys
from edgeinfer.shipping.shipped import prefer_newer_cxx
sys.executable = sys.argv[1] + "/edgeinfer-app"
path = prefer_newer_cxx(("/nowhere", sys.argv[2]))
assert path in open("/proc/self/maps").read()
print(path)
"""


@pytest.mark.parametrize(
    ("system_version", "is_preferred"), [("6.0.33", True), ("6.0.30", False), ("6.0.9", False)]
)
def test_newer_one_is_loaded_first(tmp_path: Path, system_version: str, is_preferred: bool) -> None:
    system = tmp_path / "usr/lib"
    for folder, version in ((tmp_path / "app/_internal", "6.0.30"), (system, system_version)):
        folder.mkdir(parents=True)
        library = folder / f"libstdc++.so.{version}"
        compile_it = ["gcc", "-x", "c", "-shared", "-fPIC", "-o", library, "-"]
        subprocess.run(compile_it, input=b"int any;", check=True)
        (folder / "libstdc++.so.6").symlink_to(library.name)
    said = run_python(CHILD, tmp_path / "app", system)
    assert said.strip() == (f"{system}/libstdc++.so.6" if is_preferred else "")
