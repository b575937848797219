"""Smaller copies of models, importance matrices and what they cost, computed in helper processes."""
