"""Verbs about snapshots and the processes that run."""
