"""Guesses at the next tokens, from the text itself or from a small model."""
