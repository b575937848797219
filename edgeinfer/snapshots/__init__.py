"""Snapshots of a loaded process: `registry` on disk, `builder`, `restore`, `transfer`.

docs/development/processes.md has the table of all processes, with parent and reaper.
"""
