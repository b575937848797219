"""Build a snapshot: load and park a process, spill and bake its memory, verify a restore."""
