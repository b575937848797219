"""Open the prefix cache of one loaded model; its identity covers all that decides a state's bits."""

from __future__ import annotations

import msgspec

from edgeinfer.runtime.kv_cache.cache import KvCache
from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.llama.context import ActiveContext
from edgeinfer.runtime.llama.model import LlamaModel, open_context
from edgeinfer.runtime.llama.state import SequenceStates
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.runtime.prefix_cache.keys import model_key
from edgeinfer.runtime.prefix_cache.lookup import PrefixCache, block_tokens
from edgeinfer.runtime.prefix_cache.roundtrip_check import RoundtripCheck
from edgeinfer.runtime.prefix_cache.store import BlockStore

#: Tokens of a block of a model with a large recurrent state.
_LONG_BLOCK = 2048
#: Tokens a step of the check computes.
_CHECK_BATCH = 32


def open_blocks(
    store: BlockStore,
    files: ModelFiles,
    options: LoadOptions,
    loaded: LlamaModel,
    active: ActiveContext,
    kv: KvCache,
    checked: str = "",
) -> PrefixCache:
    """Open the blocks of this model, for the decode thread.

    `checked` is an earlier result of `run_check` with this build of llama.cpp. Raises OSError.
    """
    size = size_of_blocks(loaded)
    blocks = store.model(model_key(files.sha256, files.paths), identity(loaded, size))
    if checked and not blocks.read_check():
        blocks.note_check(checked)
    return PrefixCache(
        blocks=blocks,
        states=make_states(loaded, active),
        active=active,
        kv=kv,
        block_tokens=size,
        check=_check(options, loaded),
    )


def run_check(options: LoadOptions, loaded: LlamaModel) -> str:
    """Run the round-trip check now: "exact", or the failure."""
    check = _check(options, loaded)
    while (found := check.step()) is None:
        continue
    return found


def _check(options: LoadOptions, loaded: LlamaModel) -> RoundtripCheck:
    window = loaded.sliding_window
    options = msgspec.structs.replace(options, kv_type=loaded.choices["kv_type"].value)

    def open_small(n_cells: int, n_seq: int) -> ActiveContext:
        return open_context(
            loaded.model,
            options,
            n_cells=n_cells,
            n_batch=_CHECK_BATCH,
            n_seq_max=n_seq,
            n_threads=loaded.n_threads,
            n_outputs=n_seq,
        )

    return RoundtripCheck(
        open_small,
        loaded.vocab.n_vocab,
        window,
        block_tokens(window),
        supports_truncation=loaded.supports_truncation,
    )


def size_of_blocks(loaded: LlamaModel) -> int:
    """Return the tokens of a block: more for recurrent models, whose blocks carry their large state."""
    is_large = any(".ssm." in key or ".wkv." in key for key in loaded.meta)
    return _LONG_BLOCK if is_large else block_tokens(loaded.sliding_window)


def make_states(loaded: LlamaModel, active: ActiveContext) -> SequenceStates:
    return SequenceStates(active, scratch_id(loaded), supports_truncation=loaded.supports_truncation)


def scratch_id(loaded: LlamaModel) -> int:
    """Return the sequence id that ranges of states pass through; the KV cache never assigns it."""
    return loaded.plan.n_seq_max - 1


def identity(loaded: LlamaModel, size: int) -> dict[str, str]:
    """Describe everything besides the model's file that decides a bit of a block."""
    build = libllama.build_info()
    chosen = {name: str(loaded.choices[name].value) for name in ("kv_type", "gpu_layers")}
    arch = loaded.meta.get("general.architecture", "")
    trained = loaded.meta.get(f"{arch}.rope.scaling.original_context_length", "")
    return chosen | {
        "llama": f"{build.binding_version} {build.llama_version} {build.ggml_commit}",
        "cpu": build.cpu_variant,
        "kernels": f"{build.kernels} {build.kernels_version}".strip(),
        "flash": str(loaded.choices["flash_attention"].value),
        # factors for long contexts are another set than those for short ones
        "rope": "long" if trained.isdigit() and loaded.n_cells > int(trained) else "short",
        "block": str(size),
    }
