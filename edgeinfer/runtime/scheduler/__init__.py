"""The scheduler: one step of the engine, with a module for each part of the step.

engine_core ─┬─ request_queue     waiting and running requests: admission, preemption, end
             ├─ prefixes          give sequences their cached prefixes, from memory and from disk
             ├─ batch_planner     fill the next batch: decode tokens, draft tokens, chunks of prompts
             ├─ prefill_policy    how many prompt tokens a step has, and how many steps only decode
             ├─ executor          one llama_decode per step, aborted for a short incoming request
             └─ output_processor  sample tokens, report progress, end requests

`input_processor` converts a request to a `sequence`; an `observer` records a request without changing
it. `idle_cells` returns the KV cache's memory to the OS, `batch_invariance` limits the steps whose
results are bit-identical to unbatched ones, and `divergence` finds where a prompt differs from the
cached prefixes.
"""
