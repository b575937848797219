"""The step of the decode loop, by roles.

scheduler ── request_queue     which requests wait and run, admission, and how a request ends
          ├─ prefixes          what a request acquires from memory and disk, and what it releases
          ├─ batch_planner     the next batch: decode tokens, draft tokens, chunks of prompts
          ├─ prefill_policy    how large the chunks are
          ├─ executor          one llama_decode, aborted early for a short incoming request
          ├─ output_processor  sampled tokens, progress, ends
          └─ idle_cells        memory of the KV cache that is returned while idle
"""
