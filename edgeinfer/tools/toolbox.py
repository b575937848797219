"""The tools of all enabled servers, and the servers' sessions. New tools are appended to the order.

The lists of tools are stored on disk. So a new chat can offer the tools to the model without starting a
server, and unchanged lists give the same prompt prefix. The first call of a tool starts its server. If
the server's list has changed, a notice tells the user, and changed tools need approval again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from edgeinfer.config.config_file import ToolsConfig
from edgeinfer.errors import EdgeInferError, ToolServerError
from edgeinfer.platform import paths
from edgeinfer.platform.disk import write_durably
from edgeinfer.runtime.requests import Tool
from edgeinfer.tools.builtin import Builtin
from edgeinfer.tools.builtin_files import BuiltinFiles
from edgeinfer.tools.mcp_client import McpClient, ToolInfo
from edgeinfer.tools.mcp_servers import load_servers
from edgeinfer.tools.sandbox import Sandbox
from edgeinfer.tools.tool_use import Stop, StoppedError, safe_text, shown_name
from edgeinfer.tools.web import Web

#: Maximum number of characters of a tool's description that the model gets.
_MOST_DESCRIPTION = 4000
#: Maximum number of tools in a request.
_MOST_TOOLS = 128


class KnownServer(msgspec.Struct, kw_only=True):
    """A server's last known list of tools. `digest` is the ServerSpec's digest at that time.

    `unapproved` names those of `tools` that were added or changed, and not yet approved.
    """

    digest: str
    tools: list[ToolInfo]
    unapproved: list[str] = []


class BoundTool(msgspec.Struct, frozen=True):
    """A tool and its server. `is_new`: added or changed since the first list, and not yet approved."""

    server: str
    info: ToolInfo
    is_new: bool = False


def records_path() -> Path:
    return paths.data_dir() / "tools.json"


class Toolbox:
    """Starts the enabled tool servers and holds their sessions, which `close` ends. Thread-safe.

    `notices` has messages for the user, e.g. about servers that failed and tools that have changed.
    """

    def __init__(self, config: ToolsConfig, folder: Path) -> None:
        self.config = config
        self.folder = folder
        servers: list[Builtin] = [
            BuiltinFiles(folder, config.builtin),
            Sandbox(folder, config.builtin, config.timeout_s),
            Web(config.fetch_hosts, config.builtin),
        ]
        self._builtin = {server.server: server for server in servers if server.tools()}
        #: Usable built-in tool servers by name (before `prepare`: all), and the reasons why others
        #: cannot be used.
        self.builtin, self._unavailable = self._builtin, dict[str, str]()
        specs, self.notices = load_servers(config, folder)
        self._specs = {spec.name: spec for spec in specs if spec.name not in self._builtin}
        for name in self._builtin.keys() & {spec.name for spec in specs}:
            self.notices.append(f"{name} is left out: a built-in server has the same name; rename it")
        #: Whether the model can run commands, which may change programs in the chat's folder. If so,
        #: MCP servers are started outside of that folder.
        self._is_apart = not {"shell", "python"}.isdisjoint(config.builtin)
        self._started: dict[str, McpClient] = {}
        self._starting = {name: threading.Lock() for name in self._specs}
        self._lock = threading.RLock()
        #: `close` sets this, which ends MCP servers that are being started.
        self._closing = Stop()
        self._records = _read_records()

    def __enter__(self) -> Toolbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def servers(self) -> list[str]:
        """Return the names of the enabled MCP servers, in the order in which they were first used."""
        first = [name for name in tuple(self._records) if name in self._specs]
        return [*first, *(name for name in self._specs if name not in first)]

    def prepare(self, *, refresh: bool = False) -> None:
        """Request the tool lists of MCP servers that have sent none; with `refresh`, of all of them.

        Failed servers and unusable built-in tools are left out; `notices` says why.
        """
        before = self._unavailable
        reasons = {name: builtin.unavailable() for name, builtin in self._builtin.items()}
        self._unavailable = reasons
        self.builtin = {name: server for name, server in self._builtin.items() if not reasons[name]}
        for name, reason in reasons.items():
            if reason and reason != before.get(name):
                tools = " and ".join(tool.name for tool in self._builtin[name].tools())
                self.notices.append(f"{tools}: not available: {reason}")
        names = [name for name in self.servers() if refresh or not self._is_known(name)]
        failures: dict[str, str] = {}

        def start(name: str) -> None:
            try:
                self.start(name)
            except EdgeInferError as error:
                failures[name] = safe_text(error.message_and_hint, _MOST_DESCRIPTION)
            except StoppedError:
                failures[name] = f"tool server {name}: the user stopped the start"

        _in_threads([functools.partial(start, name) for name in names])
        self.notices += [failures[name] for name in names if name in failures]
        if excess := list(self.bound_tools())[_MOST_TOOLS:]:
            cut = safe_text(", ".join(excess), _MOST_DESCRIPTION)
            self.notices.append(f"more than {_MOST_TOOLS} tools: left out: {cut}")

    def _is_known(self, name: str) -> bool:
        record = self._records.get(name)
        return record is not None and record.digest == self._specs[name].digest

    def bound_tools(self) -> dict[str, BoundTool]:
        """Return the tools in their order in requests; keys are their names there, `SERVER__TOOL`."""
        bound: dict[str, BoundTool] = {}
        for name, builtin in self.builtin.items():
            for info in builtin.tools():
                bound[shown_name(name, info.name)] = BoundTool(name, info)
        for name in self.servers():
            if (record := self._records.get(name)) is not None:
                for info in record.tools:
                    tool = BoundTool(name, info, info.name in record.unapproved)
                    bound.setdefault(shown_name(name, info.name), tool)
        return bound

    def tools(self) -> tuple[Tool, ...]:
        """Return the value of a request's field `tools`: the first 128 of `bound_tools`."""
        return tuple(
            Tool(
                name=name,
                description=safe_text(tool.info.description, _MOST_DESCRIPTION),
                parameters=tool.info.parameters,
            )
            for name, tool in islice(self.bound_tools().items(), _MOST_TOOLS)
        )

    def start(self, name: str, stop: Stop | None = None) -> McpClient | Builtin:
        """Return a server's session, and start the server if needed.

        Raises ToolServerError, or StoppedError if `stop` is set.
        """
        if name in self.builtin:
            return self.builtin[name]
        if name not in self._specs:
            raise ToolServerError(
                f"there is no tool server named {name}",
                hint=f"servers: {', '.join([*self.builtin, *self.servers()])}",
            )
        any_stop, stop = Stop(), stop or Stop()
        with (
            stop.calling(any_stop.set),
            self._closing.calling(any_stop.set),
            any_stop.holding(self._starting[name]),
        ):
            return self._start(name, any_stop)

    def _start(self, name: str, stop: Stop) -> McpClient:
        client = self._started.get(name)
        if client is not None and client.lost:
            client.close()
            client = None
        is_new = client is None
        if client is None:
            spec, timeout_s = self._specs[name], self.config.timeout_s
            client = McpClient(spec, self.folder, timeout_s, is_apart=self._is_apart, stop=stop)
            with self._lock:
                if self._closing.is_set:
                    client.close()
                    raise StoppedError
                self._started[name] = client
        if is_new or client.list_changed:
            try:
                tools = client.tools(stop)
            except (ToolServerError, StoppedError):
                client.lost = client.lost or "its tools could not be listed"
                raise
            with self._lock:
                self._note_list(name, tools)
                self.notices += client.notices
                client.notices = []
        return client

    def _note_list(self, name: str, tools: list[ToolInfo]) -> None:
        """Store a server's list of tools: known ones in their order, then new ones."""
        digest = self._specs[name].digest
        record = self._records.get(name)
        by_name = {tool.name: tool for tool in tools}
        if record is None or record.digest != digest:
            self._records[name] = KnownServer(digest=digest, tools=list(by_name.values()))
        elif by_name != (before := {tool.name: tool for tool in record.tools}):
            ordered = [by_name[n] for n in before | by_name if n in by_name]
            changed = [tool.name for tool in ordered if before.get(tool.name) != tool]
            unapproved = sorted({*record.unapproved, *changed} & by_name.keys())
            self._records[name] = KnownServer(digest=digest, tools=ordered, unapproved=unapproved)
            lists = {"new or changed": changed, "gone": [n for n in before if n not in by_name]}
            text = "; ".join(f"{label}: {', '.join(names)}" for label, names in lists.items() if names)
            self.notices.append(f"the tools of {name} have changed. {text}".rstrip())
        else:
            return
        self._write_records()

    def approve(self, tool: BoundTool) -> None:
        """Record that the user has approved a new or changed tool."""
        with self._lock:
            record = self._records.get(tool.server)
            if record is not None and tool.info.name in record.unapproved:
                record.unapproved.remove(tool.info.name)
                self._write_records()

    def _write_records(self) -> None:
        with contextlib.suppress(OSError):
            paths.make_folder(paths.data_dir())
            write_durably(records_path(), msgspec.json.encode(self._records), 0o600)

    def close(self) -> None:
        """End every session. Idempotent."""
        self._closing.set()
        with self._lock:
            clients, self._started = self._started, {}
        _in_threads([client.close for client in clients.values()])


def _in_threads(works: Sequence[Callable[[], object]]) -> None:
    """Run functions in parallel threads, and wait for all of them."""
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _read_records() -> dict[str, KnownServer]:
    try:
        return msgspec.json.decode(records_path().read_bytes(), type=dict[str, KnownServer])
    except (OSError, msgspec.MsgspecError, RecursionError):
        return {}
