"""Models as files: `models.toml`, sources, fetching, GGUF headers. Knows no engine."""
