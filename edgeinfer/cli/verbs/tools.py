"""`edgeinfer tools`: list the configured tool servers with their tools."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from edgeinfer.cli.parser import add_option
from edgeinfer.cli.result import Result
from edgeinfer.host import EngineHost


class OfferedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool. `asks`: its calls need the user's approval, or the configuration denies them."""

    name: str
    description: str
    asks: bool


class ToolServer(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    tools: tuple[OfferedTool, ...] = ()


class ToolsResult(Result, frozen=True, kw_only=True):
    """All enabled tool servers. `notices`: messages about failed servers and changed tools."""

    servers: tuple[ToolServer, ...]
    notices: tuple[str, ...] = ()

    def human(self) -> str:
        lines = list(self.notices)
        for server in self.servers:
            lines.append(server.name if server.tools else f"{server.name}: no tools")
            for tool in server.tools:
                first = tool.description.strip().partition("\n")[0]
                lines.append(f"  {'asks   ' if tool.asks else 'allowed'}  {tool.name:<24} {first[:60]}")
        return "\n".join(line.rstrip() for line in lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--check", "start every server and ask it for its tools")


def run(options: argparse.Namespace, host: EngineHost) -> ToolsResult:
    """List tools; without any, say how to add some. Raises ConfigError."""
    from edgeinfer.tools.loop import HOW_TO_ADD, ChatTools

    if not host.config.tools.has_tools:
        return ToolsResult(servers=(), notices=(f"no tools are configured: {HOW_TO_ADD}",))
    tools = ChatTools(host.config.tools, Path.cwd())
    try:
        notices = tools.prepare(refresh=options.check)
        if options.check:
            from edgeinfer.runtime.chat_format.tool_call_grammar import describe_loose

            notices += filter(None, map(describe_loose, tools.request_tools()))
        by_server = tools.tools_by_server()
    finally:
        tools.close()
    return ToolsResult(
        servers=tuple(
            ToolServer(
                name=name,
                tools=tuple(
                    OfferedTool(name=tool.name, description=tool.description, asks=level != "allow")
                    for tool, level in offered
                ),
            )
            for name, offered in by_server.items()
        ),
        notices=tuple(notices),
    )
