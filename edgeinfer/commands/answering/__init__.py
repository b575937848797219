"""Verbs by which a model answers."""
