"""Build a snapshot: load and park a process, bake its memory, verify a restore."""
