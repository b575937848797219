"""Approval of tool calls: patterns of the configuration, and permissions given in the chat.

A pattern is `SERVER.TOOL` or `SERVER.TOOL(ARGUMENT=VALUE, …)`. `*` matches any text, and a backslash
makes the next character literal. `allow` matches a call only as it is spelled, `deny` in every
spelling. What a server says about its tools can only make approval stricter.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Hashable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import msgspec

from edgeinfer.config.config_file import ToolsConfig, change
from edgeinfer.errors import ConfigError

Level = Literal["allow", "ask", "deny"]
#: The user's choices: allow this call, this tool in this conversation, or all calls that match the
#: proposed pattern; or refuse, with a reason for the model.
Choice = Literal["once", "conversation", "pattern", "no"]

_PATTERN = re.compile(r"((?:\\.|[^\\()\s])+?)\.((?:\\.|[^\\().\s])+)(?:\((.*)\))?", re.DOTALL)
_ARGUMENT = re.compile(r"\s*((?:\\.|[\w.-])+)=((?:\\.|[^,\\])*)(?:,|$)", re.DOTALL)
_ATOM = re.compile(r"\\?.", re.DOTALL)
#: Match the characters that get a backslash in a proposed pattern, because they have a meaning there:
#: in the value of an argument, and in its name.
_IN_VALUE, _IN_NAME = r"[\\*,\n]", r"[^\w.-]"
#: Matches a pattern for URLs, e.g. `https://*.example.org/docs/*`: scheme, host with port, path.
_URL_PATTERN = re.compile(r"((?:\\.|[\w.*+-])+)://([^/?#]*)([/?#].*)?", re.DOTALL)
_URL = re.compile(r"(https?)://([\w.:[\]-]+)([/?#][^\\\s]*)?", re.IGNORECASE)
#: Characters that can begin a second shell command. If an argument contains one of these, a pattern
#: with `*` does not match the argument, unless the argument is a path or URL.
_OPERATORS = re.compile(r"[;&|<>`$(){}\\\r\n]")
#: Names of arguments that are paths. For such an argument, a pattern with the path's folder is
#: proposed, and `*` does not match hidden names such as `.ssh`.
_PATHS = {"path", "file", "filename", "file_path", "filepath"}
_LONGEST_PROPOSED = 200
_LONGEST_PATH = 4096
_KEYS: dict[str, Choice] = {"y": "once", "yes": "once", "a": "conversation", "p": "pattern"}


class Decision(msgspec.Struct, frozen=True):
    """The user's decision about one tool call. If the choice is "no", the model gets the `reason`."""

    choice: Choice
    reason: str = ""


class Pattern(msgspec.Struct, frozen=True):
    """A parsed pattern of tool calls. `arguments` has pairs (name, pattern of the value).

    `is_bare`: the pattern is `SERVER.TOOL()`, which matches only calls without arguments.
    """

    server: str
    tool: str
    arguments: tuple[tuple[str, str], ...] = ()
    is_bare: bool = False

    def allows(self, server: str, tool: str, arguments: dict[str, Any]) -> bool:
        """Return whether the pattern, as one of `allow` in config.toml, matches the call as written."""
        return (
            self._names(server, tool)
            and not (self.is_bare and arguments)
            and all(
                name in arguments and _is_allowed(value, name, argument_text(arguments[name]))
                for name, value in self.arguments
            )
        )

    def denies(self, server: str, tool: str, arguments: dict[str, Any], folder: Path) -> bool:
        """Return whether the pattern, as one of `deny` in config.toml, matches a spelling of the call.

        Letter case does not matter, and a path also counts without `..` and links. Relative paths in
        the call are resolved against `folder`.
        """
        return self._names(server, tool, re.IGNORECASE) and all(
            any(
                _glob(value.removeprefix("./"), text, re.IGNORECASE)
                for text in _spellings(arguments.get(name), folder)
            )
            for name, value in self.arguments
        )

    def _names(self, server: str, tool: str, flags: int = 0) -> bool:
        return _glob(self.server, server, flags) and _glob(self.tool, tool, flags)


def parse(text: str, origin: str = "") -> Pattern:
    """Parse a pattern such as `files.write(path=notes/*)`.

    Raises ConfigError if it is invalid; its message begins with `origin`.
    """
    match = _PATTERN.fullmatch(text.strip())
    inner = match[3] if match else None
    pairs = _ARGUMENT.findall(inner or "")
    if match is None or sum(len(m[0]) for m in _ARGUMENT.finditer(inner or "")) != len(inner or ""):
        problem = f"{origin}{text!r} is not a pattern `SERVER.TOOL` or `SERVER.TOOL(ARGUMENT=VALUE, …)`"
        raise ConfigError(problem, hint="e.g. `files.*` or `files.write(path=notes/*)`")
    arguments = tuple((_unescape(name), value) for name, value in pairs)
    return Pattern(match[1], match[2], arguments, is_bare=inner == "")


def _escape(text: str, special: str = r"[\\*(),.\s]") -> str:
    return re.sub(special, lambda match: r"\n" if match[0] == "\n" else f"\\{match[0]}", text)


def _unescape(text: str) -> str:
    return "".join(_literal(atom) for atom in _ATOM.findall(text))


def _literal(atom: str) -> str:
    return "\n" if atom == r"\n" else atom[-1]


def _has_wildcard(pattern: str) -> bool:
    return "*" in _ATOM.findall(pattern)


def _glob(pattern: str, text: str, flags: int = 0, wildcard: str = ".*") -> bool:
    # fnmatch is not used, because it takes brackets and question marks in paths for wildcards, too
    atoms = (wildcard if atom == "*" else re.escape(_literal(atom)) for atom in _ATOM.findall(pattern))
    return re.fullmatch("".join(atoms), text, flags | re.DOTALL) is not None


def _is_allowed(pattern: str, name: str, text: str) -> bool:
    if not _has_wildcard(pattern):
        return _unescape(pattern) == text
    if url := _URL_PATTERN.fullmatch(pattern):
        call = _url(text)
        # a final `*` may stand for any path, but not for the end of the host: `https://a.org*` must not
        # match a.org.example
        host = re.sub(r"(?<=[^:])\*$", "", url[2])
        path = url[3] or ("/" if host == url[2] else "/*")
        return (
            call is not None
            and _glob(url[1], call[0], re.IGNORECASE)
            and _glob(host, call[1], re.IGNORECASE, "[^/:?#]*")
            and _glob(path, call[2])
        )
    if re.match(r"[\w.+-]+://", text) and pattern != "*":
        return False
    if name.lower() not in _PATHS and _OPERATORS.search(text):
        return False
    hidden = {piece for piece in text.split("/") if piece.startswith(".")}
    if name.lower() in _PATHS and hidden - set(_unescape(pattern).split("/")):
        return False
    return _glob(pattern.removeprefix("./"), text) and ".." not in text.split("/")


def _url(text: str) -> tuple[str, str, str] | None:
    """Return scheme, host with port, and path with query of a plainly spelled URL; otherwise None."""
    match = _URL.fullmatch(text)
    if match is None or ".." in unquote(match[3] or "").replace("\\", "/").split("/"):
        return None
    return match[1].lower(), match[2].lower(), match[3] or "/"


def _spellings(value: Any, folder: Path) -> Iterator[str]:
    """Yield what an argument may mean: the members of a list, other spellings of a path or URL."""
    if isinstance(value, dict | list):
        for member in value.values() if isinstance(value, dict) else value:
            yield from _spellings(member, folder)
    if value is None:
        return
    text = argument_text(value)
    yield text
    yield from (piece.strip() for piece in re.split(r"[;&|<>`(){}\r\n]|\$\(", text))
    if len(text) > _LONGEST_PATH or "\0" in text:
        return
    if ":" in text:
        yield from _spellings_of_address(text)
    for path in (text, os.path.expanduser(text)):
        lexical = os.path.normpath(folder / path)
        for absolute in (lexical, os.path.realpath(lexical), os.path.realpath(folder / path)):
            for spelling in (absolute, os.path.relpath(absolute, folder)):
                # with a slash at its end, a folder also matches a pattern for all paths below it, e.g.
                # `/etc/*`
                yield from (spelling, f"{spelling}/")


def _spellings_of_address(text: str) -> Iterator[str]:
    text = unicodedata.normalize("NFKC", re.sub(r"\s", "", text)).replace("\\", "/").replace("。", ".")
    try:
        parts = urlsplit(text)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return
    host = (parts.hostname or "").rstrip(".")
    for path in (parts.path, os.path.normpath(unquote(parts.path or "/"))):
        for address in (host, host + port):
            yield f"{parts.scheme}://{address}{path.replace('//', '/')}"


def argument_text(value: Any) -> str:
    """Return an argument as text, for patterns and users: a string as it is, other types in JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def pattern_for(server: str, tool: str, arguments: dict[str, Any]) -> str:
    """Propose a pattern that allows this call and similar ones.

    Similar calls have a path in the same folder, or a URL of the same host. All other arguments must be
    equal, except in a pattern for the built-in file tools, which has only the path. Returns "" if no
    pattern of up to 200 characters allows this call.
    """
    is_file = server == "files" and "path" in arguments
    restricted = {"path": arguments["path"]} if is_file else arguments
    texts = ((name, argument_text(value)) for name, value in restricted.items())
    values = (f"{_escape(name, _IN_NAME)}={_value_for(name, text)}" for name, text in texts)
    pattern = f"{_escape(server)}.{_escape(tool)}({', '.join(values)})"
    with suppress(ConfigError):
        if len(pattern) <= _LONGEST_PROPOSED and parse(pattern).allows(server, tool, arguments):
            return pattern
    return ""


def _value_for(name: str, text: str) -> str:
    folder = os.path.dirname(text)
    if address := _url(text):
        return _escape(f"{address[0]}://{address[1]}/", _IN_VALUE) + "*"
    if name in _PATHS and folder.strip("/.") and ".." not in text.split("/"):
        return f"{_escape(folder, _IN_VALUE)}/*"
    return _escape(text, _IN_VALUE)


def parse_decision(text: str) -> Decision:
    """Parse what the user typed: `y` (once), `a` (in this conversation), `p` (pattern) or `n REASON`.

    Any other text refuses the call, and is the reason.
    """
    text = text.strip()
    if (choice := _KEYS.get(text.lower())) is not None:
        return Decision(choice)
    first, _, reason = text.partition(" ")
    return Decision("no", reason.strip() if first.lower() in ("n", "no") else text)


class Approvals:
    """Decides which calls need the user's approval, by configured patterns and earlier permissions."""

    def __init__(self, config: ToolsConfig, folder: Path) -> None:
        self.allow = [parse(text, "`tools.allow` in config.toml: ") for text in config.allow]
        self._deny = [parse(text, "`tools.deny` in config.toml: ") for text in config.deny]
        self._by_conversation: dict[Hashable, list[Pattern]] = {}
        self._folder = folder.resolve()

    def level(
        self,
        server: str,
        tool: str,
        arguments: dict[str, Any],
        *,
        conversation: Hashable = 0,
        destructive: bool = False,
        harmless: bool = False,
    ) -> Level:
        """Return whether a call is allowed, needs approval ("ask"), or is denied.

        Permissions of `allow_here` apply only to the same `conversation`. `harmless`: a built-in tool
        that only reads, which needs no approval. `destructive`: the server says that the tool may
        destroy data; a pattern such as `SERVER.*` then does not allow the call.
        """
        call = (server, tool, arguments)
        if any(pattern.denies(*call, self._folder) for pattern in self._deny):
            return "deny"
        if any(pattern.allows(*call) for pattern in self._by_conversation.get(conversation, ())):
            return "allow"
        allowed = [pattern for pattern in self.allow if pattern.allows(*call)]
        if destructive:  # the user may have written `server.*` before the server had this tool
            allowed = [p for p in allowed if not _has_wildcard(p.server + p.tool)]
        return "allow" if allowed or harmless else "ask"

    def allow_here(self, conversation: Hashable, server: str, tool: str) -> None:
        """Allow all calls of a tool in this conversation."""
        pattern = Pattern(_escape(server), _escape(tool))
        self._by_conversation.setdefault(conversation, []).append(pattern)

    def allow_always(self, text: str) -> None:
        """Allow calls that match a pattern, and add the pattern to config.toml. Raises ConfigError."""
        self.allow.append(parse(text))

        def add(listed: list[str] | None) -> list[str]:
            listed = [] if listed is None else listed  # appending to tomlkit's list keeps the comments
            listed.append(text)
            return listed

        change(("tools", "allow"), add)
