"""The shipped file: its payload, unpacking it, running from it, putting a model inside."""
