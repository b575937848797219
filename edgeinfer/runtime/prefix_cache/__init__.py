"""The on-disk prefix cache: KV blocks that outlive memory, process and conversation.

    engine ── lookup, writer ──> store ── format     the file of a block
                                 ├─────── keys       the name of a block
                                 └─────── retention  limits, and the order of eviction
              roundtrip_check    the test that a model's blocks are bit-identical after a restore
              opening            the prefix cache of one loaded model

There is no index: a lookup tests one block name after another, so many processes share the folder
without a lock.
"""
