"""The configured MCP servers: of config.toml, and of the mcp.json files that it names.

Formats: Claude Desktop, Cursor and LM Studio (`mcpServers`), VS Code (`servers`); read in place.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

import msgspec

from edgeinfer.config.config_file import ToolsConfig
from edgeinfer.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")
_PLACE = re.compile(r"\$\{(?:(env|input):)?([^}]+)\}")
#: Strings stay; comments go, then commas before a closing bracket.
_JSONC = (
    re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL),
    re.compile(r'("(?:\\.|[^"\\])*")|,(?=\s*[\]}])'),
)


class ServerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One server: a `command` with its variables, or a `url` with its headers."""

    name: str
    command: tuple[str, ...] = ()
    env: dict[str, str] = {}
    url: str = ""
    headers: dict[str, str] = {}

    @property
    def digest(self) -> str:
        """Return a hash of what is started or asked; without the values of variables and headers."""
        parts = (self.command, self.url, sorted(self.env), sorted(self.headers))
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]


def configured(config: ToolsConfig, folder: Path) -> list[ServerSpec]:
    """Return the enabled servers, each name once; config.toml goes before the files it names.

    Raises ConfigError for a file that cannot be read, and for a server that names nothing to start.
    """
    found = {
        name: _spec("config.toml", name, msgspec.to_builtins(server), folder)
        for name, server in config.servers.items()
    }
    for file in config.mcp_files:
        for name, entry in _entries(Path(file).expanduser()).items():
            if name not in found and not _is_disabled(entry):
                found[name] = _spec(file, name, entry, folder)
    return list(found.values())


def _entries(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}", hint="correct `tools.mcp-files`") from error
    try:
        for left_out in _JSONC:
            text = left_out.sub(lambda match: match[1] or "", text)
        document = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}", hint="correct the file") from error
    for key in ("mcpServers", "servers", "mcp"):
        inner = document.get(key) if isinstance(document, dict) else None
        if key == "mcp" and isinstance(inner, dict):
            inner = inner.get("servers")
        if isinstance(inner, dict):
            return inner
    raise ConfigError(f"{path}: no `mcpServers` and no `servers`", hint="correct `tools.mcp-files`")


def _is_disabled(entry: Any) -> bool:
    return isinstance(entry, dict) and (entry.get("disabled") is True or entry.get("enabled") is False)


def _spec(where: str, name: str, entry: Any, folder: Path) -> ServerSpec:
    entry = entry if isinstance(entry, dict) else {}
    label = f"{where}: tool server {name}"
    if not _NAME.fullmatch(name) or "__" in name:
        raise ConfigError(f"{label}: a name has letters, digits and single `-`, `_`, `.`")
    command, url = entry.get("command"), entry.get("url") or entry.get("serverUrl")
    words = [command, *(entry.get("args") or ())] if isinstance(command, str) else list(command or ())
    if bool(words) == bool(url):
        raise ConfigError(f"{label}: give either `command` or `url`")
    if url and not str(url).startswith(("http://", "https://")):
        raise ConfigError(f"{label}: {url} is no address", hint="https://…")
    env = {**(entry.get("env") or {}), **{n: f"${{env:{n}}}" for n in entry.get("pass-env") or ()}}
    filled = [_filled(label, word, folder) for word in words]
    return ServerSpec(
        name=name,
        command=tuple(os.path.expanduser(word) for word in filled[:1]) + tuple(filled[1:]),
        env={str(k): _filled(label, v, folder) for k, v in env.items()},
        url=_filled(label, url, folder) if url else "",
        headers={str(k): _filled(label, v, folder) for k, v in (entry.get("headers") or {}).items()},
    )


def _filled(label: str, text: Any, folder: Path) -> str:
    """Replace `${env:NAME}`, `${NAME}` and `${workspaceFolder}`. Raises ConfigError for others."""

    def value(match: re.Match[str]) -> str:
        kind, name = match.groups()
        if kind == "input":
            raise ConfigError(
                f"{label}: {match[0]} is asked by VS Code alone",
                hint=f"write ${{env:{name}}} and set that variable",
            )
        if not kind and name in ("workspaceFolder", "cwd"):
            return str(folder)
        if not kind and name in ("userHome", "HOME"):
            return os.path.expanduser("~")
        if name not in os.environ:
            raise ConfigError(f"{label}: the variable {name} is not set", hint=f"export {name}=…")
        return os.environ[name]

    return _PLACE.sub(value, str(text))
