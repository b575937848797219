"""Snapshots of a loaded process: `shelf` on the disk, `building`, `launching`, and `resumed` again.

docs/development/processes.md is the table of all processes: who starts and reaps each, and what it speaks.
"""
