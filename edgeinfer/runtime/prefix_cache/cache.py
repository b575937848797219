"""The on-disk prefix cache of one loaded model: restore blocks, save ended sequences.

`start_load` finds the blocks of a prompt and starts to read them, `load_block` appends one block to a
sequence. `block_saver` saves sequences. Not thread-safe.

Blocks are shorter than a sliding window. At the end of a longer block, llama.cpp would have dropped its
first cells, but a truncation inside the block would need them (decision 080).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from edgeinfer.runtime.kv_cache import AdapterKey, CachedSequence, KvCache, common_prefix
from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.llama.context import LlamaContext
from edgeinfer.runtime.llama.model import LlamaModel
from edgeinfer.runtime.llama.state import make_states
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.runtime.prefix_cache.block_folder import BlockStore
from edgeinfer.runtime.prefix_cache.block_saver import BlockSaver, RoundtripVerdict
from edgeinfer.runtime.prefix_cache.kv_block import Chain, KvBlock, block_tokens, model_key
from edgeinfer.runtime.prefix_cache.roundtrip_check import RoundtripCheck
from edgeinfer.runtime.prompt_tokens import PromptTokens
from edgeinfer.runtime.requests import GenerateRequest

#: Blocks are loaded only if they save at least this many tokens of prefill.
_MIN_GAIN_TOKENS = 32
#: A request waits for the round-trip check only if blocks save at least this multiple of the tokens
#: that the check computes.
_MIN_GAIN_CHECKS = 2
#: Shortest time (s) that a request waits for a block before it prefills instead.
_MIN_WAIT_S = 0.05


class PrefixCache:
    """Restores and saves KV blocks of `context`.

    Blocks are restored only after the round-trip check has shown that this changes no bit.
    """

    def __init__(
        self,
        store: BlockStore,
        files: ModelFiles,
        options: LoadOptions,
        context: LlamaContext,
        kv: KvCache,
        loaded: LlamaModel,
        check_outcome: str = "",
    ) -> None:
        """Open a model's blocks; `check_outcome` is "" if no check has run yet. Raises OSError."""
        self.context, self.kv = context, kv
        self.block_tokens = model_block_tokens(loaded)
        self.folder = folder = store.open_folder(
            model_key(files.sha256, files.paths), identity(loaded, self.block_tokens), self.block_tokens
        )
        if check_outcome and not folder.read_check():
            folder.save_check(check_outcome)
        self.states = make_states(loaded, context)
        self.verdict = RoundtripVerdict(folder, RoundtripCheck(options, loaded))
        self.saver = BlockSaver(folder=folder, states=self.states, kv=kv, verdict=self.verdict)

    def start_load(
        self,
        tokens: PromptTokens,
        adapters: AdapterKey,
        salt: str,
        n_cached: int,
        *,
        is_only_request: bool,
    ) -> BlockLoad | None:
        """Start to read a prompt's blocks from disk; its first `n_cached` tokens are cached in memory.

        Returns None if the blocks would save little prefill or the round-trip check has failed. If the
        check has not run yet, it runs now, but only if blocks save much prefill and no other request
        would wait (`is_only_request`). Otherwise the result is None, too.
        The first block may begin before `n_cached`.
        """
        if self.verdict.is_refused or len(tokens) - n_cached <= _MIN_GAIN_TOKENS:
            return None
        chain = self.folder.names.chain(tokens, adapters, salt)
        names, ends = chain.names, chain.ends
        n_full = next(
            (i for i, name in enumerate(names[1:]) if not self.folder.has(name)), len(names) - 1
        )
        if self.kv.checkpoints is not None:
            n_full, tail, n_tail = self._last_checkpoint(chain, n_full, tokens)
            first = 0
        else:
            unmatched = tokens[ends[n_full] :]
            tail, n_tail = max(
                self.folder.find_tail(names[n_full], unmatched),
                self.folder.find_boundary_block(names[n_full], unmatched),
                key=lambda match: match[1],
            )
            first = min(chain.index_at(n_cached), n_full)
        stop = min(ends[n_full] + n_tail, len(tokens) - 1)
        gain = stop - n_cached
        if gain < _MIN_GAIN_TOKENS or not self._passes_check(gain, is_only_request=is_only_request):
            return None
        block_names = [*names[1 + first : 1 + n_full], *([tail] if n_tail else [])]
        self.folder.touch([*names[1 : 1 + n_full], tail])
        futures = self._start_reading(block_names, [*ends[first : 1 + n_full], stop])
        return BlockLoad(futures, ends[first], stop)

    def _start_reading(
        self, names: Sequence[bytes], ends: Sequence[int]
    ) -> list[Future[KvBlock | None]]:
        """Read blocks on other threads, in order; block `i` has the tokens [ends[i], ends[i + 1]).

        The thread first allocates the pages of the block's cells, unless they will be mapped.
        """
        cells, offset = self.context.cells, self.kv.used_cells - ends[0]
        is_mapped = cells.is_page_aligned(offset - self.kv.pinned_cells)

        def read(i: int, name: bytes) -> KvBlock | None:
            if not is_mapped:
                cells.populate(offset + ends[i], offset + ends[i + 1])
            return self.folder.read(name)

        return [self.folder.readers.submit(read, i, name) for i, name in enumerate(names)]

    def _last_checkpoint(self, chain: Chain, n_full: int, tokens: list[int]) -> tuple[int, bytes, int]:
        """Return parent's index, name and length (0: none) of the block with the last checkpoint."""
        ends = [*chain.ends, len(tokens)]
        for i in range(n_full, -1, -1):
            limit = min(ends[i + 1], len(tokens) - 1)
            name, n = self.folder.find_checkpoint(chain.names[i], tokens[ends[i] : limit])
            if n:
                return i, name, n
        return 0, b"", 0

    def _passes_check(self, gain_tokens: int, *, is_only_request: bool) -> bool:
        if is_only_request and gain_tokens >= _MIN_GAIN_CHECKS * self.verdict.n_tokens:
            while not self.verdict.outcome:
                self.verdict.step()
        return self.verdict.outcome == "exact"

    @property
    def can_store(self) -> bool:
        """Return whether blocks are stored: the round-trip check passed and the folder is writable."""
        return self.verdict.outcome == "exact" and self.folder.can_write

    def can_evict(self, cached_seq: CachedSequence) -> bool:
        """Return whether a sequence is idle and all its tokens are on disk or will be when dropped."""
        is_needed = cached_seq.in_use or cached_seq.pinned or cached_seq.is_prefetched
        if is_needed or len(cached_seq.cells) < self.block_tokens:
            return False
        return self.can_store and self.saver.would_store(cached_seq)

    def record_preamble(
        self, request: GenerateRequest, tokens: PromptTokens, adapters: AdapterKey
    ) -> None:
        """Record the blocks of a coding agent's prompt: blocks that sessions share are evicted last."""
        if request.preamble and not self.verdict.is_refused:
            names = self.folder.names.chain(tokens, adapters, request.cache_salt).names[1:]
            self.folder.record_session(request.preamble, names, request.cache_salt)

    def load_block(self, load: BlockLoad, cached_seq: CachedSequence, tokens: list[int]) -> bool:
        """Append the next block of `load`, which must be ready, to `cached_seq`.

        `tokens` is the whole prompt. Returns False if no more blocks can be appended: the block is
        unusable, the prompt differs from it, or there are too few cells.
        """
        block = load.next_block()
        n_before = len(cached_seq.tokens)
        if block is None:
            return False
        loaded = block.tokens
        n = loaded.round_down(min(common_prefix(loaded, tokens[n_before:]), load.stop - n_before))
        fits = n > 0 and self.kv.make_room(len(loaded))
        if not fits or not self.states.restore(cached_seq.seq_id, block.states[0]):
            return False
        self.kv.record_computed(cached_seq, loaded)
        if self.kv.checkpoints is None:
            return self.kv.truncate(cached_seq, n_before + n) and n == len(loaded)
        if not load.is_done:
            return True
        is_restored = n == len(loaded) and self.states.restore_checkpoint(
            cached_seq.seq_id, block.states[1].join_pieces()
        )
        self.kv.save_checkpoint(cached_seq)
        return is_restored

    def drop_unfinished(self, cached_seq: CachedSequence) -> None:
        """Drop the tokens of a partly loaded sequence, if the model does not support truncation."""
        if self.kv.checkpoints is not None:
            self.kv.truncate(cached_seq, 0)


@dataclass(slots=True, eq=False)
class BlockLoad:
    """Blocks with the tokens [start, stop) that are being read and appended to a sequence.

    `futures` are the blocks in order (None for an unusable one); the first `n_loaded` are appended.
    `n_in_memory` tokens of the prompt were cached in memory before the load. The wait for the next
    block began at `waits_since` (monotonic time, s).
    """

    futures: Sequence[Future[KvBlock | None]]
    start: int
    stop: int
    n_loaded: int = 0
    n_in_memory: int = 0
    waits_since: float = field(default_factory=time.monotonic)

    @property
    def is_done(self) -> bool:
        return self.n_loaded == len(self.futures)

    @property
    def is_ready(self) -> bool:
        """Return whether the next block has been read."""
        return self.futures[self.n_loaded].done()

    def next_block(self) -> KvBlock | None:
        """Return the next block, which must be ready, or None if it is unusable."""
        block = self.futures[self.n_loaded].result()
        self.n_loaded += 1
        self.waits_since = time.monotonic()
        return block

    def is_too_slow(self, prefill_s: float) -> bool:
        """Return whether prefilling the next block (`prefill_s`) is faster than waiting for it."""
        if self.is_ready:
            return False  # the disk has answered; this thread was busy
        return time.monotonic() - self.waits_since > max(_MIN_WAIT_S, prefill_s)

    def wait(self, timeout_s: float) -> None:
        wait([self.futures[self.n_loaded]], timeout_s)

    def cancel(self) -> None:
        for future in self.futures[self.n_loaded :]:
            future.cancel()


#: Tokens per block of a model with a large recurrent state.
_LONG_BLOCK_TOKENS = 2048


def model_block_tokens(loaded: LlamaModel) -> int:
    """Return the tokens per KV block: 2,048 with the large states of Mamba or RWKV, else up to 256."""
    has_large_state = any(".ssm." in key or ".wkv." in key for key in loaded.meta)
    return _LONG_BLOCK_TOKENS if has_large_state else block_tokens(loaded.sliding_window)


def identity(loaded: LlamaModel, n_tokens: int) -> dict[str, str]:
    """Return all settings, besides the model, that change the bits of a block of `n_tokens`."""
    build = libllama.build_info()
    names = (name for name in ("kv_type", "gpu_layers", "gpus") if name in loaded.choices)
    options = {name: str(loaded.choices[name].value) for name in names}
    arch = loaded.meta.get("general.architecture", "")
    trained = loaded.meta.get(f"{arch}.rope.scaling.original_context_length", "")
    return options | {
        "llama": f"{build.binding_version} {build.llama_version} {build.ggml_commit}",
        "cpu": build.cpu_variant,
        "kernels": f"{build.kernels} {build.kernels_version}".strip(),
        "flash": str(loaded.choices["flash_attention"].value),
        # some models have different RoPE factors for long and short contexts
        "rope": "long" if trained.isdigit() and loaded.n_cells > int(trained) else "short",
        "block": str(n_tokens),
    }
