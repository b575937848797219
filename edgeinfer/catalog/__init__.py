"""Models as files: `models.toml`, sources, fetching and verifying, GGUF headers, quantizing. Knows no
engine.
"""
