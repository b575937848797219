"""Computed blocks in the engine: finds them, puts them back, copies them out, checks them first."""
