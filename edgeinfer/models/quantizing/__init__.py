"""Quantize models, make importance matrices and measure the loss, in helper processes."""
