"""Conversations as plain values, and their SQLite store. Knows no screen."""
