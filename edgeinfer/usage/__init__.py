"""Daily usage: counts of answers, and what changed between two weeks."""
