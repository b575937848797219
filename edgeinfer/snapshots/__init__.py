"""Snapshots of a loaded process: `shelf` on the disk, `building`, `launching`, and `resumed` again.

docs/development/processes.md has the table of all processes: who starts and reaps each.
"""
