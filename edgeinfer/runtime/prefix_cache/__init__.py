"""The on-disk prefix cache: KV blocks that survive eviction, the process and the conversation.

    cache ─┬─ block_saver ─────┐         save ended sequences as blocks
           └─ roundtrip_check  │         test that restored blocks are bit-identical
                               └─ block_folder ─┬─ retention    disk limit, order of eviction
                                                └─ kv_block     a block's name and file

`cache` is the prefix cache of one loaded model. `block_folder` finds and reads its blocks, and writes
them on a thread. There is no index: a search looks for one block name after another, so processes
share the folder without a lock.
"""
