"""The decode loop: scheduling, the KV cache, sampling, speculation, output."""
