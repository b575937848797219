"""Snapshots of processes with a loaded model: their registry, builder, restore and transfer.

docs/development/processes.md has a table of all processes and their parents.
"""
