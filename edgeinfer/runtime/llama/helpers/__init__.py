"""Programs that use llama.cpp in a separate process, and report with lines of JSON on stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from edgeinfer.errors import EdgeInferError
from edgeinfer.platform.process import die_with_parent
from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.llama.context import Batch, LlamaContext


def report(code: int = 0, /, **fields: Any) -> int:
    """Write a line of JSON to stdout and return `code`, the exit status for `main`."""
    sys.stdout.buffer.write(msgspec.json.encode(fields) + b"\n")
    sys.stdout.buffer.flush()
    return code


def run(work: Callable[[list[str]], dict[str, Any]]) -> int:
    """Run `work` with the program's arguments; report its result or its error; return the status."""
    die_with_parent()
    try:
        return report(event="done", **work(sys.argv[1:]))
    except EdgeInferError as error:
        return report(1, event="error", message=error.message)


def scoring_params(n_tokens: int, n_batch: int) -> Any:
    """Make the parameters of a context of `n_tokens` in which every token may have logits."""
    params = libllama.lib().llama_context_default_params()
    params.n_ctx = n_tokens
    params.n_batch = params.n_ubatch = params.n_outputs_max = n_batch
    params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
    return params


def decode(context: LlamaContext, batch: Batch, tokens: list[int], position: int) -> None:
    """Compute the logits of all `tokens`, which begin at `position`. Raises DecodeError."""
    batch.clear()
    batch.add(tokens, position, 0, outputs=len(tokens))
    if code := batch.decode(context):
        raise libllama.decode_error(code, f"tokens {position} to {position + len(tokens) - 1}")
