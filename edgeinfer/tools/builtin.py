"""The base class of built-in tool servers, which have the methods of an MCP client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from edgeinfer.tools import self_running
from edgeinfer.tools.mcp_client import CallResult, ToolInfo, ToolServer
from edgeinfer.tools.tool_use import Progress, Stop

TEXT = {"type": "string"}
_TYPES = {"string": str, "integer": int}
#: PATH of programs that tools start. The user's PATH may lead to programs written by the model.
FIXED_PATH = "/usr/local/bin:/usr/bin:/bin"


class RefusedError(Exception):
    """A built-in tool refuses a call; the model gets the error's message as the call's result."""


def home_folder_error(folder: Path) -> str:
    """Return why tools may not work in `folder` if it contains the home folder; otherwise ""."""
    with suppress(RuntimeError):  # this user has no home folder
        if Path.home().resolve().is_relative_to(folder):
            return f"{folder} contains your home folder: start in a project folder"
    return ""


def self_running_warning(path: str) -> str:
    """Return a warning if other programs execute the file automatically (`.envrc`); otherwise ""."""
    names = {name.lower() for name in self_running.NAMES}
    name = next((name for name in path.split("/") if name.lower() in names), "")
    return f"other programs execute files in {name} automatically" if name else ""


def tool_info(
    name: str,
    description: str,
    needed: dict[str, Any],
    optional: dict[str, Any] | None = None,
    *,
    read_only: bool = False,
) -> ToolInfo:
    """Describe a tool. `needed` and `optional`: JSON schema of each argument, by its name.

    Calls of a `read_only` tool need no approval.
    """
    fields = {"properties": {**needed, **(optional or {})}, "required": list(needed)}
    schema = {"type": "object", **fields, "additionalProperties": False}
    return ToolInfo(name=name, description=description, parameters=schema, read_only=read_only)


class Builtin(ToolServer):
    """Base class of tool servers in this process. Thread-safe.

    A subclass has a method `_NAME(stop, **arguments)` for each tool NAME.
    """

    #: The server's name in patterns of `allow` and `deny`, and in tool names such as `files__read`.
    server: str

    def __init__(self, tools: Iterable[ToolInfo], enabled: Sequence[str]) -> None:
        self._tools = [tool for tool in tools if tool.name in enabled]

    def tools(self) -> list[ToolInfo]:
        return self._tools

    def unavailable(self) -> str:
        """Return why the tools cannot be used on this machine or in this folder; "" if they can."""
        return ""

    def argument_error(self, tool: ToolInfo, arguments: dict[str, Any]) -> str:
        types = {key: value["type"] for key, value in tool.parameters["properties"].items()}
        return super().argument_error(tool, arguments) or "; ".join(
            f"{key} must be of type {types[key]}"
            for key, value in arguments.items()
            if not isinstance(value, _TYPES[types[key]])
        )

    def call(
        self,
        name: str,
        arguments: dict[str, Any],
        stop: Stop | None = None,
        on_progress: Progress | None = None,
    ) -> CallResult:
        """Run a tool. Errors are returned as the result. Raises StoppedError if `stop` is set."""
        tool = next(tool for tool in self._tools if tool.name == name)
        if wrong := self.argument_error(tool, arguments):
            return CallResult(f"wrong arguments: {wrong}", is_error=True)
        try:
            result = getattr(self, f"_{name}")(stop or Stop(), **arguments)
            return result if isinstance(result, CallResult) else CallResult(result)
        except (RefusedError, OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            return CallResult(reason or type(error).__name__, is_error=True)
