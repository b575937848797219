"""Configurations with the servers of `tool_servers.py`."""

import sys
from pathlib import Path

from edgeinfer.config.config_file import ToolsConfig, ToolServerConfig

SERVERS = Path(__file__).with_name("tool_servers.py")


def command(kind, *rest):
    return (sys.executable, str(SERVERS), kind, *rest)


def tools_config(*kinds, **fields):
    servers = {kind: ToolServerConfig(command=command(kind)) for kind in kinds}
    return ToolsConfig(servers=servers, **fields)
