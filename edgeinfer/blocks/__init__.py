"""Computed blocks on disk: what a model has read, kept beyond memory, process and machine.

    engine ── ModelBlocks.names, .has, .read_ahead, .write ──> store.py ── format.py (the file)
                                                               ├── names.py    what a block is called
                                                               ├── writer.py   the thread that writes
                                                               ├── limits.py   how much, who goes first
                                                               └── kept.py     what agents begin with

The room knows bytes, tokens and names, and nothing of llama.cpp. There is no index: a prefix is found
by asking for one name after another, so many processes share the folder without a lock. These files
hold what a person wrote. They are never part of a snapshot.
"""
