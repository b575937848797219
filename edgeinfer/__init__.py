"""edgeinfer: local language models that start at once."""

__version__ = "0.2.0"
