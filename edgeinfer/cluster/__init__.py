"""A Ray Serve application over this program's endpoint: a deployment a model, scaled by Ray."""
