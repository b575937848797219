"""edgeinfer: local language models that feel already loaded."""

__version__ = "0.1.0"
