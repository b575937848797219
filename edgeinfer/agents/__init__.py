"""Configure third-party coding agents for a local endpoint, and reuse prefixes of their prompts.

    cli/verbs/launch ┬─ known_agents.py          points an agent at the endpoint, and runs it
                     └─ endpoint.py              finds, starts and calls an `edgeinfer serve`
    server ──────────── prompt_normalization.py  moves lines that change after the shared prefix, and
                                                 predicts the first lines of a session in another folder

An agent's own configuration is never changed. Instead the agent gets environment variables, arguments,
and files in a temporary folder, which is deleted when the agent ends.
"""
