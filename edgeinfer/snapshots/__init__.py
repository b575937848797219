"""Snapshots of processes with a loaded model. docs/development/processes.md lists all processes."""
