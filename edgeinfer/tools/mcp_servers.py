"""The configured MCP servers: in config.toml, and in the mcp.json files that config.toml lists.

The files may belong to Claude Desktop, Cursor, LM Studio (`mcpServers`) or VS Code (`servers`).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from edgeinfer.config.config_file import ToolsConfig
from edgeinfer.config.toml_file import convert
from edgeinfer.errors import ConfigError, ToolServerError

_MAX_NAME = 48
_PLACE = re.compile(r"\$\{(?:(env|input):)?((?:(?!:-)[^}])+)(?::-([^}]*))?\}")
#: Environment variables of this process that every MCP server gets, too.
_PASSED = ("HOME", "LANG", "LC_ALL", "LC_CTYPE", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER")
#: Suffixes of scripts in the command of an MCP server. A server whose script the model's tools can
#: change is not started.
_SCRIPTS = (".py", ".js", ".mjs", ".cjs", ".ts", ".sh", ".rb", ".pl", ".php", ".lua", ".jar", ".pyz")
#: Patterns that find comments and trailing commas in JSON, to remove them. Strings match as group 1,
#: and are kept.
_JSONC = (
    re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL),
    re.compile(r'("(?:\\.|[^"\\])*")|,(?=\s*[\]}])'),
)


class ServerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a server: `command` with environment `env`, or `url` with `headers`."""

    name: str
    command: tuple[str, ...] = ()
    env: dict[str, str] = {}
    url: str = ""
    headers: dict[str, str] = {}

    @property
    def digest(self) -> str:
        """Hash of command and URL, and of the names (not the values) of variables and headers.

        If the hash has changed, the server's list of tools is requested again.
        """
        parts = (self.command, self.url, sorted(self.env), sorted(self.headers))
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]


_Scalar = str | int | float | bool | None


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A server's entry as a file has it."""

    command: str | list[str] | None = None
    args: list[_Scalar] | None = None
    env: dict[str, _Scalar] | None = None
    pass_env: list[str] | None = msgspec.field(default=None, name="pass-env")
    url: str | None = None
    server_url: str | None = msgspec.field(default=None, name="serverUrl")
    headers: dict[str, _Scalar] | None = None


def load_servers(config: ToolsConfig, folder: Path) -> tuple[list[ServerSpec], list[str]]:
    """Return the enabled servers, those of config.toml first, and a message for each invalid one."""
    specs: dict[str, ServerSpec] = {}
    left_out: list[str] = []
    for where, entries in _sources(config, folder, left_out):
        for written_name, entry in entries.items():
            name = _valid_name(written_name)
            if name in specs or _is_disabled(entry):
                continue
            try:
                specs[name] = _spec(f"{where}: tool server {written_name}", name, entry, folder)
            except ConfigError as error:
                left_out.append(f"{error.message_and_hint}: left out")
    return list(specs.values()), left_out


def _sources(
    config: ToolsConfig, folder: Path, left_out: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "config.toml", {name: msgspec.to_builtins(server) for name, server in config.servers.items()}
    is_writable = not {"shell", "python"}.isdisjoint(config.builtin)
    for file in config.mcp_files:
        try:
            path = Path(file).expanduser()
            if is_writable and _is_below(path, folder):
                raise ConfigError(
                    f"{file}: the tools `shell` and `python` can change this file",
                    hint=f"move the file out of {folder}, or remove both tools from `tools.builtin`",
                )
            yield file, _entries(path)
        except ConfigError as error:
            left_out.append(f"{error.message_and_hint}: left out")
        except RuntimeError:
            left_out.append(f"{file}: this user has no home folder: left out")


def _valid_name(name: str) -> str:
    """Return the name with characters that tool names allow: `Figma Dev Mode` → `Figma-Dev-Mode`."""
    return re.sub(r"__+", "_", re.sub(r"[^A-Za-z0-9._-]+", "-", name)).strip("-._")[:_MAX_NAME]


def _entries(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text("utf-8-sig")
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror}"
        raise ConfigError(problem, hint="correct `tools.mcp-files` in config.toml") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text", hint="save the file as UTF-8") from error
    try:
        for left_out in _JSONC:
            text = left_out.sub(lambda match: match[1] or "", text)
        document = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}", hint="correct the file") from error
    for key in ("mcpServers", "servers", "mcp"):
        inner = document.get(key) if isinstance(document, dict) else None
        if key == "mcp" and isinstance(inner, dict):
            inner = inner.get("servers")
        if isinstance(inner, dict):
            return inner
    raise ConfigError(
        f"{path} has neither the key `mcpServers` nor `servers`",
        hint="`tools.mcp-files` takes files of Claude Desktop, Cursor, LM Studio or VS Code",
    )


def _is_disabled(entry: Any) -> bool:
    return isinstance(entry, dict) and (entry.get("disabled") is True or entry.get("enabled") is False)


def _spec(label: str, name: str, value: Any, folder: Path) -> ServerSpec:
    """Convert an entry to a `ServerSpec`. Raises ConfigError if it is invalid."""
    entry = convert(value, _Entry, lambda _keys: label)
    url = entry.url or entry.server_url
    command = [entry.command] if isinstance(entry.command, str) else list(entry.command or ())
    if not name:
        raise ConfigError(
            f"{label}: the name has no letter from A to Z and no digit",
            hint="rename the server, e.g. `weather`",
        )
    if command and url:
        raise ConfigError(f"{label}: `command` and `url` are both set", hint="remove one of the two")
    if not command and not url:
        raise ConfigError(
            f"{label}: neither `command` nor `url` is set",
            hint="set `command` to a program, or `url` to the address of an HTTP server",
        )
    if url and not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"{label}: {url} is not an http or https URL", hint="e.g. https://mcp.example.com/mcp"
        )
    env = {**(entry.env or {}), **{name: f"${{env:{name}}}" for name in entry.pass_env or ()}}
    filled = [_fill(label, word, folder) for word in (*command, *(entry.args or ()))]
    return ServerSpec(
        name=name,
        command=(os.path.expanduser(filled[0]), *filled[1:]) if command else (),
        env={key: _fill(label, text, folder) for key, text in env.items()},
        url=_fill(label, url, folder) if url else "",
        headers={key: _fill(label, text, folder) for key, text in (entry.headers or {}).items()},
    )


def _fill(label: str, text: Any, folder: Path) -> str:
    """Replace `${env:NAME}`, `${NAME:-DEFAULT}`, `${workspaceFolder}`. Raises ConfigError."""

    def value(match: re.Match[str]) -> str:
        kind, name, default = match.groups()
        if kind == "input":
            message = f"{label}: {match[0]} (an input prompt of VS Code) is not supported"
            raise ConfigError(message, hint=f"write ${{env:{name}}} and set that variable")
        if not kind and name in ("workspaceFolder", "cwd"):
            return str(folder)
        if not kind and name in ("userHome", "HOME"):
            return os.path.expanduser("~")
        filled = os.environ.get(name) or default
        if filled is None and name not in os.environ:
            problem = f"{label}: the environment variable {name} is not set"
            raise ConfigError(problem, hint=f"export {name}=…")
        return filled or ""

    filled_text = _PLACE.sub(value, str(text))
    if "\0" in filled_text:
        raise ConfigError(
            f"{label}: a value contains a NUL character",
            hint="remove it from `command`, `args`, `env`, `url` or `headers`",
        )
    return filled_text


#: What starts an MCP server: command, environment variables, and working folder (None: a new empty
#: folder).
_Start = tuple[tuple[str, ...], dict[str, str], Path | None]


def plan_start(spec: ServerSpec, folder: Path) -> _Start:
    """Plan a start in `folder`: return command, environment variables, and working folder."""
    passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
    return spec.command, passed | spec.env, folder


def plan_start_apart(spec: ServerSpec, folder: Path) -> _Start:
    """Plan a start that executes nothing below `folder`; the working folder will be a new empty one.

    The tools `shell` and `python` may have changed programs there. Raises ToolServerError if the
    command's program or a script is below `folder`, or if the program is not found elsewhere.
    """
    command, variables, _ = plan_start(spec, folder)
    for name in [name for name in variables if name.endswith("PATH")]:
        variables[name] = path_outside(variables[name], folder)
    typed = str(folder / command[0]) if "/" in command[0] else command[0]
    program = shutil.which(typed, path=variables.get("PATH"))
    if program is None:
        raise ToolServerError(
            f"tool server {spec.name}: there is no program {command[0]} outside {folder}",
            hint="install the program, or correct `command` in the configuration",
        )
    scripts = [folder / word for word in command[1:] if word.endswith(_SCRIPTS)]
    for path in (Path(program), *(path for path in scripts if path.is_file())):
        if _is_below(path, folder):
            raise ToolServerError(
                f"tool server {spec.name} was not started: `shell` and `python` can change {path}",
                hint=f"move that file out of {folder}, or remove both tools from `tools.builtin`",
            )
    return (program, *command[1:]), variables | {"PYTHONSAFEPATH": "1"}, None


def path_outside(path: str, folder: Path) -> str:
    """Return the search path `path` (as in $PATH) without relative entries and those below `folder`."""
    entries = path.split(os.pathsep)
    return os.pathsep.join(e for e in entries if os.path.isabs(e) and not _is_below(e, folder))


def _is_below(path: str | Path, folder: Path) -> bool:
    """Return whether a path is below `folder`, or passes through a link that is."""
    real = os.path.realpath(folder)
    steps = (path, *Path(os.path.abspath(path)).parents)
    return any(Path(os.path.realpath(step)).is_relative_to(real) for step in steps)
