"""The KV cache in memory: which tokens lie where, and checkpoints of recurrent states."""
