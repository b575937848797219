"""Use by day: counts of answers, and what changed between two weeks."""
