"""Tool servers for tests, each in a temporary folder."""

import pytest
from tools_here import command

from edgeinfer.tools.mcp_client import McpClient
from edgeinfer.tools.mcp_servers import ServerSpec


@pytest.fixture
def connect(tmp_path):
    """Start a server of `tool_servers.py` and return its client."""
    clients = []

    def connect(kind, *arguments, timeout_s=60.0, **fields):
        spec = ServerSpec(name=kind, command=command(kind, *arguments), **fields)
        clients.append(McpClient(spec, tmp_path, timeout_s))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()
