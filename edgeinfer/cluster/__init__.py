"""A Ray Serve application around this program's endpoint: one deployment per model, scaled by Ray."""
