"""The Open Inference Protocol (V2)."""
