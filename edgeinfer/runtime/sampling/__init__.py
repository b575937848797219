"""From logits to text: constraints, speculative decoding, stop strings, log-probabilities."""
