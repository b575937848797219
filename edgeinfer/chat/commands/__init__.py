"""The `/` commands: their table, what each does, completing them, and what some of them write."""
