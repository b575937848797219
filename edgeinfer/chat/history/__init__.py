"""Conversations as plain values, their SQLite store, and finding them again. Knows no engine."""
