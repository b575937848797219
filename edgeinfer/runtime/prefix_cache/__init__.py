"""The on-disk prefix cache: KV blocks that outlive memory, process and conversation.

    engine ── lookup, writer ──> store ── format     the file of a block
                                 ├─────── keys       what a block is called
                                 └─────── retention  how much is kept, and what is evicted first
              roundtrip_check    whether a model's blocks come back bit-identical
              opening            the prefix cache of one loaded model

There is no index: a prefix is found by asking for one name after another, so many processes share the
folder without a lock.
"""
