"""The arguments of verbs, one family of verbs a file."""
