"""Tools for the model: MCP servers, built-in tools, approvals, and the loop."""
