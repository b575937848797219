"""Tools for the model: MCP servers, built-in files, approvals, and the loop."""
