"""The on-disk prefix cache: KV blocks that survive eviction, the process and the conversation.

    cache ─┬─ writer ──────────┐         stores ended sequences
           ├─ block_search ────┤         finds the blocks of a prompt's prefix
           └─ roundtrip_check ─┤         tests that blocks are bit-identical after a restore
                               └─ block_folder ─┬─ writer_thread
                                                ├─ retention    limits, and the order of eviction
                                                └─ block_names  keyed hashes
                                                   └─ block_file  the file of a block

`cache` holds the prefix cache of one loaded model, `block_folder` its files. There is no index: a
search tests one block name after another, so processes share the folder without a lock.
"""
