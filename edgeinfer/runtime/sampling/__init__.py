"""Convert logits to text: output, stop strings, log-probabilities, constraints, speculation."""
