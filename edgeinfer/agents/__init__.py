"""Coding agents that a local endpoint serves: their configuration, and what their prompts share.

    cli/verbs/launch ┬─ known_agents.py          points an agent at the endpoint, and runs it
                     └─ endpoint.py              finds, starts and calls an `edgeinfer serve`
    server ──────────── prompt_normalization.py  moves lines that change after the shared prefix, and
                                                 predicts the first lines of a session in another folder

An agent's own configuration is never changed. It gets environment variables, arguments, and files of a
folder that is deleted with the process.
"""
