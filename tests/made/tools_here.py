"""Configurations with the servers of `tool_servers.py`, and scripted answers that call them."""

import json
import sys
import uuid
from pathlib import Path

from edgeinfer.config.config_file import ToolsConfig, ToolServerConfig, config_path
from edgeinfer.runtime.events import Finished, Timings, ToolCallDelta, Usage

SERVERS = Path(__file__).with_name("tool_servers.py")


def command(kind, *arguments):
    return (sys.executable, str(SERVERS), kind, *arguments)


def tools_config(*kinds, **fields):
    servers = {kind: ToolServerConfig(command=command(kind)) for kind in kinds}
    return ToolsConfig(servers=servers, **fields)


def configure(*kinds, **fields):
    """Write config.toml with these servers."""
    lines = ["[tools]", *(f"{name} = {json.dumps(value)}" for name, value in fields.items())]
    lines += [f"[tools.servers.{kind}]\ncommand = {json.dumps(command(kind))}" for kind in kinds]
    config_path().parent.mkdir(parents=True, exist_ok=True)
    config_path().write_text("\n".join(lines))


def calling(**calls):
    """Return the script of an answer that calls tools: `calling(plain__add={"a": 1, "b": 2})`."""
    deltas = []
    for i, (name, arguments) in enumerate(calls.items()):
        deltas.append(ToolCallDelta(i, json.dumps(arguments), f"call_{uuid.uuid4().hex}", name))
    return [*deltas, Finished(reason="tool_calls", usage=Usage(), timings=Timings())]
