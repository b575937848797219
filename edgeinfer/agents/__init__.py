"""Coding agents that a local endpoint serves: how each is configured, and what their prompts repeat.

    cli/verbs/launch ┬─ table.py                 points an agent at the endpoint, and runs it
                     └─ endpoint.py              finds, starts and calls `serve`
    server ──────────── prompt_normalization.py  moves lines that change after the shared prefix, and
                                                 predicts the first lines of a session in another folder

Nothing is written into an agent's configuration: environment, arguments, and files of a folder that is
deleted with the process.
"""
