"""Snapshots that travel: exported as OCI images that are signed, imported where they fit."""
