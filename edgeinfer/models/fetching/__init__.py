"""Fetch sources into partial files, one module a kind of source; nothing is verified here."""
