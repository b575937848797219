"""Build a snapshot: load a model, park the process, bake its memory, verify a restore."""
