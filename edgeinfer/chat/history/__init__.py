"""Conversations as plain values, their SQLite store, and search; independent of any engine."""
