"""Modules that each program imports, read from sys.modules: import-linter sees only the source."""

import ast
import json
import modulefinder
import sys

import pytest
from other_processes import run, run_python

from ..conftest import ROOT

HEAVY = """
    llama_cpp textual starlette uvicorn numpy jinja2 huggingface_hub httpx2 rich llguidance
""".split()


def modules_after(statement):
    out = run_python(f"{statement}\nimport sys, json; print(json.dumps(sorted(sys.modules)))")
    return set(json.loads(out.splitlines()[-1]))


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import edgeinfer.launcher", (*HEAVY, "msgspec", "argparse", "asyncio", "platformdirs")),
        ("from edgeinfer.cli.parser import build_parser; build_parser()", HEAVY),
        ("import edgeinfer.runtime.interface", HEAVY),
        ("import edgeinfer.tui, edgeinfer.chat, edgeinfer.server", ("llama_cpp",)),
        # the page is imported at its first request
        (
            "import edgeinfer.cli.endpoint_setup",
            ("edgeinfer.server.web.routes", "edgeinfer.tools.loop"),
        ),
        ("import edgeinfer.models.store, edgeinfer.models.catalog", HEAVY),
        # the builder clones: a clone could not release a lock that another thread holds
        ("import edgeinfer.snapshots.builder.builder", HEAVY),
        ("import edgeinfer.snapshots.restore.app_process", HEAVY),
        ("import edgeinfer.cli.verbs.show, edgeinfer.chat.model_choices", ("llama_cpp", "numpy")),
    ],
)
def test_importing_stays_light(statement, forbidden):
    loaded = modules_after(statement)
    assert sorted(name for name in forbidden if name in loaded) == []


@pytest.mark.parametrize("module", ["edgeinfer.launcher", "edgeinfer.shipping.unpack"])
def test_launcher_and_first_start_import_the_standard_library_and_edgeinfer_only(module):
    loaded = modules_after(f"import {module}")
    bare = modules_after("pass")
    foreign = {m.split(".")[0] for m in loaded - bare} - set(sys.stdlib_module_names) - {"edgeinfer"}
    assert foreign == set()


def first_start_modules():
    """List edgeinfer's modules in the shipped file's first stage, also those imported in functions."""
    finder = modulefinder.ModuleFinder([str(ROOT)])
    finder.run_script(str(ROOT / "build/first_start.py"))
    return [name for name in finder.modules if name.startswith("edgeinfer.")]


def test_first_start_needs_no_module_that_its_interpreter_lacks():
    spec = ast.parse((ROOT / "build/app.spec").read_text())
    left_out = next(
        ast.literal_eval(node.value)
        for node in spec.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SMALL"
    )
    absent = f"import sys; sys.modules.update(dict.fromkeys({left_out}))"
    run_python(f"{absent}; import {', '.join(first_start_modules())}")


def test_first_start_has_no_module_of_the_application():
    packages = {name.split(".")[1] for name in first_start_modules()}
    assert "shipping" in packages
    assert packages.isdisjoint({"cli", "launcher", "models", "runtime", "server", "tui"}), packages


#: Runs a program; this process gets a SIGINT, as by Ctrl-C, when it imports a module.
INTERRUPTED = """
import os, runpy, signal, sys
program, module, *sys.argv[1:] = sys.argv[1:]
class Interrupter:
    def find_spec(name, *_):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupter)
runpy.run_path(program, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("program", "module", "arguments"),
    [
        ("edgeinfer/__main__.py", "edgeinfer.launcher.argv", ("list",)),
        ("edgeinfer/__main__.py", "edgeinfer.launcher.launch", ("run", "hi")),
        ("edgeinfer/__main__.py", "edgeinfer.cli.main", ("list",)),
        ("edgeinfer/__main__.py", "edgeinfer.cli.parser", ("list",)),
        ("edgeinfer/__main__.py", "edgeinfer.cli.verbs.list", ("list",)),
        ("edgeinfer/__main__.py", "edgeinfer.models.external_stores", ("doctor",)),
        ("build/app_main.py", "edgeinfer.platform.process", ("list",)),
        ("build/first_start.py", "edgeinfer.shipping.unpack", ("list",)),
    ],
)
def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback(program, module, arguments):
    command = (sys.executable, "-c", INTERRUPTED, ROOT / program, module, *arguments)
    done = run(*command, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


#: Runs `doctor` with a check in whose callback from C the process gets a SIGINT.
CALLED_BACK = """
import ctypes, os, signal, sys
from edgeinfer.cli.verbs import doctor
from edgeinfer.launcher import main
callback = ctypes.CFUNCTYPE(None)(lambda: os.kill(os.getpid(), signal.SIGINT))
doctor.CHECKS.clear()
doctor.CHECKS["called back"] = lambda: callback() or []
sys.argv[1:] = ["doctor"]
sys.exit(main())
"""


def test_ctrl_c_in_a_callback_from_c_is_not_lost():
    done = run(sys.executable, "-c", CALLED_BACK, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


#: Imports what unpacks the one-file program, as the Python inside that file does.
FIRST_START = """
import sys
for name in SMALL:
    sys.modules[name] = None
import edgeinfer.shipping.unpack
"""


def test_first_start_needs_nothing_that_its_small_python_leaves_out():
    spec = ast.parse((ROOT / "build/app.spec").read_text())
    assigned = {ast.unparse(n.targets[0]): n.value for n in spec.body if isinstance(n, ast.Assign)}
    run_python(f"SMALL = {ast.unparse(assigned['SMALL'])}\n{FIRST_START}")


#: Imports every module except Ray's, as on macOS: without the names that Python has only on Linux.
ON_MACOS = """
import asyncio, ctypes.util, multiprocessing, os, select, subprocess, urllib.request, pypdfium2
import importlib, pkgutil, sys
for name in ("eventfd", "memfd_create", "pidfd_open", "posix_fadvise", "sched_getaffinity", "setns", "unshare"):
    vars(os).pop(name, None)
del select.epoll
sys.platform = "darwin"
import edgeinfer
for module in pkgutil.walk_packages(edgeinfer.__path__, "edgeinfer."):
    if not module.name.startswith("edgeinfer.cluster.") and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert "edgeinfer.snapshots.builder.builder" in sys.modules
"""


def test_every_module_can_be_imported_where_linux_names_are_missing():
    run_python(ON_MACOS)
