"""The tools of the enabled servers, in an order that only appends, and their calls.

A server's list is kept on disk: a new session shows it to the model without starting the server, and
the same list renders to the same prompt prefix. The server is started by its first call; a list that
differs then is said, and its tools ask again.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import msgspec

from edgeinfer.config.config_file import ToolsConfig
from edgeinfer.errors import ConfigError, EdgeInferError, ToolServerError
from edgeinfer.platform import paths
from edgeinfer.platform.disk import write_whole
from edgeinfer.runtime.requests import Tool
from edgeinfer.tools import elicitation
from edgeinfer.tools.builtin import Builtin
from edgeinfer.tools.builtin_files import BuiltinFiles
from edgeinfer.tools.mcp_client import McpClient, ToolInfo
from edgeinfer.tools.mcp_servers import configured
from edgeinfer.tools.sandbox import Sandbox
from edgeinfer.tools.uses import safe_text
from edgeinfer.tools.web import Web

#: Between server and tool in the name that the model sees.
SEPARATOR = "__"
#: Characters of a description that the model sees.
_MOST_DESCRIPTION = 4000


class KnownServer(msgspec.Struct, kw_only=True):
    """A server's list as it was last seen. `unapproved` tools are new or others since: they ask."""

    digest: str
    tools: list[ToolInfo]
    unapproved: list[str] = []


class BoundTool(msgspec.Struct, frozen=True):
    """A tool with its server. `is_new`: it was added or changed since the list was first seen."""

    server: str
    info: ToolInfo
    is_new: bool = False


def records_path() -> Path:
    """Return the file of the known lists."""
    return paths.data_dir() / "tools.json"


class Toolbox:
    """The enabled servers. Any thread; `close` ends every child."""

    def __init__(self, config: ToolsConfig, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.notices: list[str] = []
        #: The front end whose calls run; a server may ask its user.
        self.front: object = None
        self._builtin: dict[str, Builtin] = {
            made.server: made
            for made in (
                BuiltinFiles(folder, config.builtin),
                Sandbox(folder, config.builtin, config.timeout_s),
                Web(config.fetch_hosts, config.builtin),
            )
            if made.tools()
        }
        #: Those that can run as far as is known, and why others cannot.
        self.builtin, self._unavailable = self._builtin, dict[str, str]()
        self._specs = {spec.name: spec for spec in configured(config, folder)}
        for name in self.builtin.keys() & self._specs.keys():
            raise ConfigError(f"{name} is a built-in server: give yours another name")
        self._started: dict[str, McpClient] = {}
        self._lock = threading.RLock()
        self._known = _read_records()

    def __enter__(self) -> Toolbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def servers(self) -> list[str]:
        """Return the enabled servers, in the order in which they were first seen."""
        first = [name for name in self._known if name in self._specs]
        return [*first, *(name for name in self._specs if name not in first)]

    def prepare(self, *, refresh: bool = False) -> None:
        """Ask each server whose list is not known yet (or every one) for it.

        A server that fails is left out, and `notices` says so; built-in tools that cannot run, too.
        """
        before = self._unavailable
        found = {name: builtin.unavailable() for name, builtin in self._builtin.items()}
        self._unavailable = found
        self.builtin = {name: made for name, made in self._builtin.items() if not found[name]}
        for name, why in found.items():
            if why and why != before.get(name):
                tools = " and ".join(tool.name for tool in self._builtin[name].tools())
                self.notices.append(f"{tools}: not offered: {why}")
        for name in self.servers():
            known = self._known.get(name)
            if refresh or known is None or known.digest != self._specs[name].digest:
                try:
                    self.start(name)
                except EdgeInferError as error:
                    self.notices.append(error.message)

    def bound(self) -> dict[str, BoundTool]:
        """Return the tools by the name that the model sees, in their order."""
        found: dict[str, BoundTool] = {}
        for name, builtin in self.builtin.items():
            for info in builtin.tools():
                found[_seen(name, info)] = BoundTool(name, info)
        for name in self.servers():
            known = self._known.get(name)
            for info in known.tools if known is not None else ():
                is_new = info.name in known.unapproved if known is not None else False
                found.setdefault(_seen(name, info), BoundTool(name, info, is_new))
        return found

    def tools(self) -> tuple[Tool, ...]:
        """Return the tools as a request has them."""
        return tuple(
            Tool(
                name=name,
                description=safe_text(tool.info.description, _MOST_DESCRIPTION),
                parameters=tool.info.parameters,
            )
            for name, tool in self.bound().items()
        )

    def start(self, name: str) -> McpClient | Builtin:
        """Return the session of a server, started if need be. Raises ToolServerError."""
        with self._lock:
            if name in self.builtin:
                return self.builtin[name]
            client = self._started.get(name)
            if client is not None and not client.lost:
                if client.list_changed:
                    self._note_list(name, client.tools())
                return client
            if name not in self._specs:
                raise ToolServerError(f"there is no tool server {name}")
            client = McpClient(
                self._specs[name],
                self.folder,
                self.config.timeout_s,
                lambda params: elicitation.answer(self.front, name, params),
            )
            self._started[name] = client
            self._note_list(name, client.tools())
            return client

    def _note_list(self, name: str, tools: list[ToolInfo]) -> None:
        """Keep a server's list: known tools first, in their order, new ones behind them."""
        digest = self._specs[name].digest
        known = self._known.get(name)
        by_name = {tool.name: tool for tool in tools if tool.name}
        if known is None or known.digest != digest:
            self._known[name] = KnownServer(digest=digest, tools=list(by_name.values()))
        elif by_name != (before := {tool.name: tool for tool in known.tools}):
            kept = [by_name[n] for n in before if n in by_name]
            ordered = [*kept, *(tool for n, tool in by_name.items() if n not in before)]
            changed = [tool.name for tool in ordered if before.get(tool.name) != tool]
            gone = [n for n in before if n not in by_name]
            self._known[name] = KnownServer(
                digest=digest,
                tools=ordered,
                unapproved=sorted({n for n in (*known.unapproved, *changed) if n in by_name}),
            )
            said = [("new or changed", changed), ("gone", gone)]
            words = "; ".join(f"{what}: {', '.join(names)}" for what, names in said if names)
            self.notices.append(f"the tools of {name} have changed. {words}".rstrip())
        else:
            return
        self._write_records()

    def approve(self, tool: BoundTool) -> None:
        """Note that the user allowed a tool as it is now."""
        known = self._known.get(tool.server)
        if known is not None and tool.info.name in known.unapproved:
            known.unapproved.remove(tool.info.name)
            self._write_records()

    def _write_records(self) -> None:
        with contextlib.suppress(OSError):
            paths.data_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(records_path(), msgspec.json.encode(self._known))

    def client(self, name: str) -> McpClient:
        """Return the session of an MCP server. Raises ToolServerError."""
        found = self.start(name)
        if not isinstance(found, McpClient):
            raise ToolServerError(f"{name} is built in: it has tools alone")
        return found

    def close(self) -> None:
        """End every server. Idempotent."""
        with self._lock:
            started, self._started = self._started, {}
        closing = [threading.Thread(target=client.close) for client in started.values()]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()


def _seen(server: str, info: ToolInfo) -> str:
    return safe_text(f"{server}{SEPARATOR}{info.name}", 120)


def _read_records() -> dict[str, KnownServer]:
    try:
        return msgspec.json.decode(records_path().read_bytes(), type=dict[str, KnownServer])
    except (OSError, msgspec.MsgspecError, RecursionError):
        return {}
