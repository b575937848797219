"""Fetch sources into partial files, one module per kind of source; nothing is verified here."""
