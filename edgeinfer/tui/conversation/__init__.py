"""The chat's own screen, and the helpers it holds. Each helper holds what it needs, never the screen."""
