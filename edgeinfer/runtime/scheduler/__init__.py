"""The step of the decode loop, divided by roles.

scheduler ── request_queue     waiting and running requests, their admission and their end
          ├─ prefixes          acquire and release cached prefixes, in memory and on disk
          ├─ batch_planner     the next batch: decode tokens, draft tokens, chunks of prompts
          ├─ prefill_policy    the size of the chunks, and the time of decode-only steps
          ├─ executor          one llama_decode, aborted early for a short incoming request
          └─ output_processor  sampled tokens, progress, ends

`preparation` makes a `sequence` of each request; features that only record it are its `observer`s.
`idle_cells` returns the memory of the KV cache while idle, `batch_invariance` limits the steps that are
bit-identical to unbatched ones, and `divergence` finds where a prompt leaves the cached prefixes.
"""
