"""How model families write tool calls: `families` as values, `stream`, `grammar`."""
