"""The chat's own screen and the helpers it holds, which hold what they need, never the screen."""
