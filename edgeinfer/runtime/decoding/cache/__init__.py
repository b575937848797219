"""The KV cache: which tokens lie where, points to go back to, and parts of its state as bytes."""
