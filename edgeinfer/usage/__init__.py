"""Count a model's answers by day, and compare the distributions of two weeks."""
