"""The shipped file: its payload, unpacking it, running from it, a model inside it."""
