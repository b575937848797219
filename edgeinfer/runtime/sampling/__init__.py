"""Sampling: constraints on the logits, speculative decoding, and log-probabilities."""
