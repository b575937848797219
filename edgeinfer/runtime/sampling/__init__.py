"""Turn logits into text: output, stop strings, log-probabilities, constraints, speculation."""
