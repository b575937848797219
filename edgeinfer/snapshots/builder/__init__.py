"""Build a snapshot: load the model, park the process, dump it, bake its memory, try a restore."""
