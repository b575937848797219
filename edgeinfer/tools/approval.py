"""Who may call what: patterns of the configuration, and what the user allowed while chatting.

A pattern is `SERVER.TOOL` or `SERVER.TOOL(ARGUMENT=VALUE, …)` with `*` for any text. A server's own
claims raise the level, never lower it.
"""

from __future__ import annotations

import os
import re
from fnmatch import fnmatchcase
from typing import Any, Literal

import msgspec

from edgeinfer.config.config_file import ToolsConfig, save
from edgeinfer.errors import ConfigError

Level = Literal["allow", "ask", "deny"]
#: What the user decides: this call, the tool in this conversation, calls of the card's pattern from now
#: on, or no, with a reason for the model.
Choice = Literal["once", "conversation", "pattern", "no"]

_PATTERN = re.compile(r"([^()\s]+?)\.([^().\s]+)(?:\((.*)\))?", re.DOTALL)
_ARGUMENT = re.compile(r"\s*([\w.-]+)=((?:\\.|[^,\\])*)(?:,|$)")
_SHORT = 60
_KEYS: dict[str, Choice] = {"y": "once", "yes": "once", "a": "conversation", "p": "pattern"}


class Decision(msgspec.Struct, frozen=True):
    """The user's decision about one call. `reason` is told to the model."""

    choice: Choice
    reason: str = ""


class Pattern(msgspec.Struct, frozen=True):
    server: str
    tool: str
    arguments: tuple[tuple[str, str], ...] = ()

    def matches(self, server: str, tool: str, arguments: dict[str, Any]) -> bool:
        """Return whether the call matches. An argument that is not given matches nothing."""
        return (
            fnmatchcase(server, self.server)
            and fnmatchcase(tool, self.tool)
            and all(
                name in arguments and _glob(value, argument_text(arguments[name]))
                for name, value in self.arguments
            )
        )

    @property
    def names_tool(self) -> bool:
        """Return whether server and tool stand there without `*`."""
        return not set("*?[") & set(self.server + self.tool)


def parse(text: str) -> Pattern:
    """Parse a pattern. Raises ConfigError."""
    found = _PATTERN.fullmatch(text.strip())
    inner = found[3] if found else None
    pairs = _ARGUMENT.findall(inner) if inner else []
    rebuilt = sum(len(m[0]) for m in _ARGUMENT.finditer(inner or ""))
    if found is None or (inner is not None and (not pairs or rebuilt != len(inner))):
        raise ConfigError(
            f"{text!r} is no pattern of tool calls",
            hint="e.g. `files.*` or `files.write(path=notes/*)`",
        )
    return Pattern(found[1], found[2], tuple((n, re.sub(r"\\(.)", r"\1", v)) for n, v in pairs))


def _glob(pattern: str, text: str) -> bool:
    # only `*` is special: paths and commands have brackets and question marks
    parts = map(re.escape, pattern.split("*"))
    return re.fullmatch(".*".join(parts), text, re.DOTALL) is not None and ".." not in text.split("/")


def argument_text(value: Any) -> str:
    """Return an argument as patterns and people see it."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def pattern_for(server: str, tool: str, arguments: dict[str, Any]) -> str:
    """Propose a pattern for similar calls: paths by folder, addresses by host, short texts as is."""
    parts = []
    for name, value in arguments.items():
        text = argument_text(value)
        if match := re.match(r"https?://[^/\s]+/", text):
            text = f"{match[0]}*"
        elif "/" in text and " " not in text and os.path.dirname(text):
            text = f"{os.path.dirname(text)}/*"
        elif len(text) > _SHORT or "*" in text or "\n" in text:
            continue  # any: the pattern leaves it out
        escaped = re.sub(r"([\\,])", r"\\\1", text)
        parts.append(f"{name}={escaped}")
    return f"{server}.{tool}" + (f"({', '.join(parts)})" if parts else "")


def parse_decision(text: str) -> Decision:
    """Read what a user typed at a card: y, a, p, or n and a reason; any other words are a no."""
    word, _, rest = text.strip().partition(" ")
    choice = _KEYS.get(text.strip().lower())
    if choice is not None:
        return Decision(choice)
    return Decision("no", rest.strip() if word.lower() in ("n", "no") else text.strip())


class Approvals:
    """The policy, and what the user allowed. `conversation` keys what holds there alone."""

    def __init__(self, config: ToolsConfig) -> None:
        self._allowed = list(config.allow)
        self.allow = [parse(text) for text in config.allow]
        self._deny = [parse(text) for text in config.deny]
        self._here: dict[int, list[Pattern]] = {}

    def level(
        self,
        server: str,
        tool: str,
        arguments: dict[str, Any],
        *,
        conversation: int = 0,
        destructive: bool = False,
        harmless: bool = False,
    ) -> Level:
        """Return the level of a call. `harmless`: a built-in tool that only reads."""
        call = (server, tool, arguments)
        if any(pattern.matches(*call) for pattern in self._deny):
            return "deny"
        if any(pattern.matches(*call) for pattern in self._here.get(conversation, ())):
            return "allow"
        allowed = [pattern for pattern in self.allow if pattern.matches(*call)]
        if destructive:  # `server.*` was written without this tool in mind
            allowed = [pattern for pattern in allowed if pattern.names_tool]
        return "allow" if allowed or harmless else "ask"

    def allow_here(self, conversation: int, server: str, tool: str) -> None:
        """Allow the tool in this conversation."""
        self._here.setdefault(conversation, []).append(Pattern(server, tool))

    def allow_always(self, text: str) -> None:
        """Allow calls of a pattern from now on, in the configuration too. Raises ConfigError."""
        self.allow.append(parse(text))
        self._allowed.append(text)
        save(("tools", "allow"), self._allowed)
