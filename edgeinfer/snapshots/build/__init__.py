"""Build a snapshot: order it, load and park the process, spill and bake its memory, verify it."""
