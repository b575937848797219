"""Coding agents that a local endpoint serves: how each is configured, and what their prompts repeat.

    commands/launch ─┬─ table.py           how each is pointed at the endpoint, for one process alone
                     ├─ endpoint.py        finds, starts and asks `serve`
                     └─ running.py         runs the agent until it ends
    server ──────────┬─ prompt_normalization.py  moves lines that change behind the shared prefix
                     └─ predicted_prefix.py      first lines of a session in another folder

Nothing is written into an agent's configuration: environment, arguments, and files of a folder that is
deleted with the process.
"""
