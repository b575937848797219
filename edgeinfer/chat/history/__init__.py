"""Conversations as plain values, their SQLite store, and search. Knows no engine."""
