"""What the built-in tools share: they are called as an MCP server's are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from edgeinfer.tools.mcp_client import CallResult, ToolInfo
from edgeinfer.tools.uses import Stop

TEXT = {"type": "string"}
_TYPES = {"string": str, "integer": int}


class RefusedError(Exception):
    """A call that cannot be made, in words for the model."""


def tool_info(
    name: str,
    description: str,
    needed: dict[str, Any],
    optional: dict[str, Any] | None = None,
    *,
    read_only: bool = False,
) -> ToolInfo:
    """Describe a tool. `read_only`: it does not ask."""
    schema = {
        "type": "object",
        "properties": {**needed, **(optional or {})},
        "required": list(needed),
        "additionalProperties": False,
    }
    return ToolInfo(name=name, description=description, parameters=schema, read_only=read_only)


class Builtin:
    """A server in this process. A tool is a method `_NAME(stop, ARGUMENT…)`. Any thread."""

    #: In patterns and in the names that the model sees.
    server: str

    def __init__(self, tools: Iterable[ToolInfo]) -> None:
        self._tools = list(tools)

    def tools(self) -> list[ToolInfo]:
        return self._tools

    def unavailable(self) -> str:
        """Return why the tools cannot be offered here, or ""."""
        return ""

    def preview(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the change that a call would make, as a diff; "" for none."""
        return ""

    def call(
        self,
        name: str,
        arguments: dict[str, Any],
        stop: Stop | None = None,
        on_progress: Callable[[str], object] | None = None,
    ) -> CallResult:
        """Run a tool. Raises StoppedError."""
        schema = next(tool.parameters for tool in self._tools if tool.name == name)
        if wrong := _wrong(schema, arguments):
            return CallResult(f"wrong arguments: {wrong}", is_error=True)
        try:
            found = getattr(self, f"_{name}")(stop or Stop(), **arguments)
            return found if isinstance(found, CallResult) else CallResult(found)
        except RefusedError as error:
            return CallResult(str(error), is_error=True)
        except (OSError, UnicodeError, ValueError) as error:
            words = error.strerror if isinstance(error, OSError) else str(error)
            return CallResult(words or type(error).__name__, is_error=True)

    def close(self) -> None:
        """There is nothing to end."""


def _wrong(schema: dict[str, Any], arguments: dict[str, Any]) -> str:
    known = schema["properties"]
    said = [f"{name} is missing" for name in schema["required"] if name not in arguments]
    said += [f"there is no {name}" for name in arguments if name not in known]
    return "; ".join(said) or "; ".join(
        f"{name} must be of type {known[name]['type']}"
        for name, value in arguments.items()
        if not isinstance(value, _TYPES[known[name]["type"]])
    )
