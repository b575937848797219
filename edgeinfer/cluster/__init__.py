"""A Ray Serve application over this program's endpoint: one deployment per model, scaled by Ray."""
