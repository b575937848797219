"""Built-in tools that run code in a sandbox: shell and python. `sandbox_process` is the sandbox."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

import edgeinfer
from edgeinfer.platform.process import child_command
from edgeinfer.tools.builtin import FIXED_PATH, TEXT, Builtin, home_folder_error, tool_info
from edgeinfer.tools.mcp_client import CallResult
from edgeinfer.tools.mcp_servers import path_outside
from edgeinfer.tools.self_running import SelfRunning
from edgeinfer.tools.tool_use import STOPPED, Stop, StoppedError

#: Maximum number of bytes of a command's output; a command that writes more is killed.
MAX_OUTPUT = 1 << 20
_WHERE = "It runs in the folder, in a sandbox without a network, and sees nothing outside of it."
TOOLS = (
    tool_info("shell", f"Run a shell command. {_WHERE}", {"command": TEXT}),
    tool_info("python", f"Run a Python program, which prints its results. {_WHERE}", {"code": TEXT}),
)
#: Python program that executes the file /command. The model's code is not passed as an argument,
#: because all users can see arguments.
_PYTHON_CODE = "exec(compile(open('/command', 'rb').read(), '<string>', 'exec'))"
_VARIABLES = {"PATH": FIXED_PATH, "LANG": "C.UTF-8", "TERM": "dumb", "HOME": "/tmp", "TMPDIR": "/tmp"}  # noqa: S108
#: Without this variable, Python would run modules below HOME before the sandbox exists.
_VARIABLES["PYTHONNOUSERSITE"] = "1"


class Sandbox(Builtin):
    """The tools `shell` and `python`. Commands can change only `folder`, and have a time limit."""

    server = "sandbox"

    def __init__(self, folder: Path, enabled: Sequence[str], timeout_s: float) -> None:
        super().__init__(TOOLS, enabled)
        self._folder = folder.resolve()
        self._timeout_s = timeout_s
        frozen = getattr(sys, "frozen", False)
        self._interpreter = shutil.which("python3", path=FIXED_PATH) if frozen else sys.executable
        needed = [] if frozen else [sys.prefix, sys.base_prefix]
        self._readable = sorted({*needed, *map(os.path.realpath, needed)})

    def unavailable(self) -> str:
        if sys.platform != "linux":
            return "the sandbox needs Linux"
        if reason := home_folder_error(self._folder):
            return reason
        if own_path := self._own_program():
            return (
                f"a command in {self._folder} could change edgeinfer itself ({own_path}): "
                "install edgeinfer elsewhere, or start in another folder"
            )
        if self._interpreter is None and "python" in (tool.name for tool in self._tools):
            return "there is no python3 in /usr/bin"
        if reason := self.missing_support():
            return reason
        # a command may put programs into the folder: this process must not start them
        os.environ["PATH"] = path_outside(os.environ.get("PATH", ""), self._folder)
        return ""

    def _own_program(self) -> Path | None:
        """Return a file or folder of edgeinfer itself that a command could change; None if none."""
        code = [Path(edgeinfer.__file__).parent]
        code += [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
        paths = [*map(Path, (sys.executable, sys.prefix, sys.base_prefix, *sys.path)), *code]
        paths += [path.resolve() for path in paths]
        inside = [path for path in paths if path.is_relative_to(self._folder)]
        inside += [path for path in code if self._folder.is_relative_to(path.resolve())]
        return inside[0] if inside else None

    def missing_support(self) -> str:
        """Return why this machine cannot make a sandbox; "" if it can."""
        result = self._shell(Stop(), ":")
        return result.text.partition("\n")[0] if result.is_error else ""

    def _shell(self, stop: Stop, command: str) -> CallResult:
        return self._run(stop, ["/bin/sh", "/command"], command)

    def _python(self, stop: Stop, code: str) -> CallResult:
        return self._run(stop, [str(self._interpreter), "-c", _PYTHON_CODE], code)

    def _run(self, stop: Stop, command: list[str], code: str) -> CallResult:
        job = {
            "command": command,
            "code": code,
            "folder": str(self._folder),
            "readable": self._readable,
            "timeout_s": self._timeout_s,
        }
        files = SelfRunning(str(self._folder))
        try:
            status, out = _output(stop, job)
        finally:  # restore the files also if the child was killed
            renamed = files.restore()
            files.close()
        if stop.is_set:
            raise StoppedError(renamed or STOPPED)
        text = out.decode("utf-8", "replace")
        if renamed:
            text += f"\nended: {renamed}\n"
        if status:
            text += f"\n(exit status {status})"
        return CallResult(text, is_error=bool(status or renamed))


def _output(stop: Stop, job: dict[str, Any]) -> tuple[int, bytes]:
    """Run `job` in a child process until it ends or is stopped; return exit status and output."""
    with open(os.memfd_create("job"), "w+b") as file:
        file.write(msgspec.json.encode(job))
        file.seek(0)
        child = subprocess.Popen(
            child_command("edgeinfer.tools.sandbox_process"),
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_VARIABLES,
        )
    assert child.stdout is not None
    # SIGTERM makes the child kill the sandbox and wait for its processes
    with child, stop.calling(child.terminate):
        out = child.stdout.read(MAX_OUTPUT)
        if len(out) == MAX_OUTPUT:
            child.terminate()
            out += b"\nended: the command wrote more than 1 MiB"
        child.wait()
    return child.returncode, out
