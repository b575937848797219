"""Agents of others that a local endpoint is useful to: how each is told where its model is.

    commands/launch ── table.AGENTS ── setups.py     what each needs, for one process alone
                    ├─ endpoint.py     finding, starting and asking `serve`
                    └─ running.py      running the agent until it ends
    server ──────────┬─ changing_lines.py  what agents change in every request, cut or moved
                     └─ elsewhere.py       what a session begins with in another folder, on another day

The room writes into no agent's configuration: environment, arguments, and files of a folder that goes
with the process.
"""
