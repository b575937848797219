"""Verbs about this machine and this program."""
