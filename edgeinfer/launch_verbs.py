"""The verbs that need a model in memory: the launcher starts a process for each. Imports nothing."""

LAUNCH_VERBS = ("chat", "run", "serve", "batch")
