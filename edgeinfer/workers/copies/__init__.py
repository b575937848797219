"""Several copies of one model, each an engine in a process of its own, used as if they were one."""
