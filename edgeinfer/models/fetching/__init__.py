"""Fetch models: a module per kind of source. The caller verifies what was fetched."""
