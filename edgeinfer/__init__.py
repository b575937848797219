"""edgeinfer: local language models that feel already loaded."""

__version__ = "0.2.0"
