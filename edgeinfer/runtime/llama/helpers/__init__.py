"""Programs that run in separate processes and answer with lines of JSON on stdout."""

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


def say(code: int = 0, /, **fields: Any) -> int:
    """Write one line to stdout, flush it, and return `code` as the result of a main function."""
    sys.stdout.buffer.write(msgspec.json.encode(fields) + b"\n")
    sys.stdout.buffer.flush()
    return code


def run(work: Callable[[list[str]], dict[str, Any]]) -> int:
    """Run `work` on the arguments; write its result or its error, and return the exit status."""
    die_with_parent()
    try:
        return say(event="done", **work(sys.argv[1:]))
    except EdgeInferError as error:
        return say(1, event="error", message=error.message)


def scoring_params(n_tokens: int, n_batch: int) -> Any:
    """Make parameters of a context of `n_tokens` that computes the logits of every token."""
    params = libllama.lib().llama_context_default_params()
    params.n_ctx = n_tokens
    params.n_batch = params.n_ubatch = params.n_outputs_max = n_batch
    params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
    return params


def decode(context: LlamaContext, batch: Batch, tokens: list[int], position: int) -> None:
    """Decode `tokens`, each with logits, beginning at `position`. Raises DecodeError."""
    batch.clear()
    batch.add(tokens, position, 0, outputs=len(tokens))
    if code := batch.decode(context):
        raise libllama.decode_error(code, f"tokens {position} to {position + len(tokens) - 1}")
