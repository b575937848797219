"""Snapshots of a loaded process: `format` and `registry` on disk, `build`, `restore`, `transfer`.

docs/development/processes.md has the table of all processes, with parent and reaper.
"""
