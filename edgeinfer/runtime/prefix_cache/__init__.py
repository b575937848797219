"""The on-disk prefix cache: KV blocks that survive eviction, the process and the conversation.

    cache ─┬─ block_saver ─────┐         save ended sequences as blocks
           ├─ block_search ────┤         find the blocks of a prompt's prefix
           └─ roundtrip_check ─┤         test that restored blocks are bit-identical
                               └─ block_folder ─┬─ retention    disk limit, order of eviction
                                                └─ block_names  keyed hashes
                                                   └─ block_file  the format of a block's file

`cache` is the prefix cache of one loaded model, `block_folder` its files and the thread that writes
them. There is no index: a search looks for one block name after another, so processes share the folder
without a lock.
"""
