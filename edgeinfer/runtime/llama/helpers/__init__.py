"""Programs that run in processes of their own and answer in lines of JSON on stdout."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from edgeinfer.runtime.llama import libllama


def say(code: int = 0, /, **fields: Any) -> int:
    """Write one line to stdout at once and return `code`, so that a main can end with it."""
    sys.stdout.buffer.write(msgspec.json.encode(fields) + b"\n")
    sys.stdout.buffer.flush()
    return code


def fail(fallback: str) -> int:
    """Report llama.cpp's last errors, or `fallback`; the exit status 1."""
    return say(1, event="error", message="; ".join(libllama.recent_log(3)) or fallback)


def scoring_params(n_tokens: int, n_batch: int) -> Any:
    """Make parameters of a context of `n_tokens` that computes the logits of every token."""
    params = libllama.L.llama_context_default_params()
    params.n_ctx = n_tokens
    params.n_batch = params.n_ubatch = params.n_outputs_max = n_batch
    params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
    return params
