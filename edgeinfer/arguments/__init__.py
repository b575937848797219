"""The command line: one family of verbs a file, each verb with the function that runs it."""
