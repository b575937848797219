"""The one-file program that releases ship: its payload, unpacking, running from it, a model inside."""
