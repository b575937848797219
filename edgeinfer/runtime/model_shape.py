"""Compute how much memory a model takes from its file's metadata: `Shape` and `Buffers`.

`edgeinfer show` takes the metadata from the GGUF header, the loader from the loaded model. The size of
the KV cache is computed as llama.cpp does, with full-size sliding windows. The compute buffer's size is
an estimate; `docs/guides/quantizing.md` gives the measured error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

#: Type of the KV cache → bytes per element.
_KV_BYTES = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
#: Matches llama.cpp's names of expert weights.
_EXPERT_WEIGHT = re.compile(r"_(ch)?exps\.weight$")
#: Elements per block of a quantized KV cache (q8_0 or q4_0).
_KV_BLOCK = 32
#: A draft model's vocabulary may have this many tokens more or less, because files pad vocabularies.
_MAX_DRAFT_PADDING = 512
#: llama.cpp rounds the cells of a context up to a multiple of this.
CELL_STEP = 256
#: Architectures that have sliding windows in some layers, even if the file does not say in which ones.
_WINDOWED = frozenset(
    """gemma2 gemma3 gemma3n gemma-embedding cohere2 exaone4 gpt-oss llama4 olmo2 plamo3 smallthinker
    modern-bert""".split()
)
#: Architectures with sliding windows even if the file has no window size.
_WINDOW_DEFAULTS = frozenset(("gemma2", "exaone4", "llama4"))
#: A model with one of these metadata keys (prefixed by the architecture) has recurrent layers.
_RECURRENT_KEYS = ("ssm.state_size", "shortconv.l_cache", "wkv.head_size")
#: Metadata keys (prefixed by the architecture) of head lengths that differ from the usual ones: with
#: latent attention (MLA), and in layers with a sliding window.
_LATENT = "attention.kv_lora_rank"
_OTHER_HEADS = (
    _LATENT,
    *(f"attention.{vector}_length_{kind}" for kind in ("swa", "mla") for vector in ("key", "value")),
)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a model that decide how much memory it needs.

    - weights_bytes_per_token: bytes of weights read for a token, without the experts not used for it.
    - n_query: elements of one token's Q in a layer.
    - kv_rows: elements of one token's K and of its V in each layer; () without attention.
    - head_lengths: elements of a head's K and V, then those in layers with windows or latent attention.
    - can_quantize_kv: each head is a whole number of blocks of the quantized KV types.
    - state_elements: float32 elements of one sequence's recurrent state.
    - embedding_bytes, expert_bytes: sizes of the token table and of all experts, in `weights_bytes`.
    - unread_bytes: size of the token table if the output is a separate tensor, so that a token reads
      only one row of the table; 0 if unknown.
    - layer_tensor_bytes: size of the largest weight of a layer that is not an expert; 0 if unknown.
    """

    weights_bytes: int
    weights_bytes_per_token: int
    file_type: int
    n_ctx_train: int
    n_vocab: int
    n_embd: int
    n_ff: int
    n_query: int
    kv_rows: tuple[int, ...]
    head_lengths: tuple[int, ...] = ()
    state_elements: int = 0
    has_windows: bool = False
    is_recurrent: bool = False
    can_quantize_kv: bool = True
    n_layer: int = 0
    embedding_bytes: int = 0
    expert_bytes: int = 0
    unread_bytes: int = 0
    layer_tensor_bytes: int = 0

    @property
    def used_expert_bytes(self) -> int:
        """Bytes of all experts that one token uses."""
        read = self.weights_bytes_per_token + self.unread_bytes
        return max(0, self.expert_bytes - self.weights_bytes + read)

    @property
    def kv_elements(self) -> int:
        return sum(self.kv_rows)

    def kv_row_bytes(self, kv_type: str) -> tuple[int, ...]:
        """Return the size (bytes) of each of `kv_rows`."""
        return tuple(int(row * _KV_BYTES[kv_type]) for row in self.kv_rows)

    def kv_bytes_per_token(self, kv_type: str) -> int:
        return int(self.kv_elements * _KV_BYTES[kv_type])

    def logits_bytes(self, n_tokens: int) -> int:
        """Return the memory (bytes) of the logits of `n_tokens`: a float32 per vocabulary token."""
        return 4 * n_tokens * max(1, self.n_vocab)


def draft_problem(draft: Shape, large: Shape) -> str:
    """Return why `draft` cannot be a draft model for `large`, "" if `draft` can."""
    if draft.is_recurrent:
        return "the draft model's state cannot be truncated to an earlier token"
    if abs(draft.n_vocab - large.n_vocab) > _MAX_DRAFT_PADDING:
        return f"the draft model's vocabulary differs ({draft.n_vocab:,} tokens, not {large.n_vocab:,})"
    return ""


class Buffers(msgspec.Struct, frozen=True, kw_only=True):
    """Memory (bytes) of a loaded model. `kv_per_1000_bytes`: KV cache of 1,000 more tokens."""

    n_ctx: int
    n_parallel: int
    kv_type: str
    weights_bytes: int
    kv_bytes: int
    kv_per_1000_bytes: int
    compute_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.compute_bytes


def make_shape(
    metadata: Mapping[str, object], *, n_vocab: int, n_params: int, weights_bytes: int
) -> Shape:
    """Compute a model's sizes from its metadata. Missing and impossible values count as 0."""
    keys = _Keys(metadata)
    heads = max(keys.per_layer("attention.head_count"), default=0)
    n_embd = keys.number("embedding_length")
    n_ff_expert = keys.number("expert_used_count") * keys.number("expert_feed_forward_length")
    key_length = keys.number("attention.key_length")
    head_lengths = keys.head_lengths(heads)
    kv_rows, state_elements = _cache_sizes(keys, head_lengths)
    n_ff = max(*keys.per_layer("feed_forward_length"), n_ff_expert, 0)
    experts = _expert_share(keys, n_params)
    return Shape(
        weights_bytes=weights_bytes,
        weights_bytes_per_token=int(weights_bytes * (1.0 - experts * _share_unused(keys))),
        file_type=keys.of("general.file_type", -1),
        n_ctx_train=keys.number("context_length"),
        n_vocab=n_vocab,
        n_embd=n_embd,
        n_ff=n_ff,
        n_query=heads * key_length if key_length else n_embd,
        kv_rows=kv_rows,
        head_lengths=head_lengths,
        state_elements=state_elements,
        has_windows=keys.has_windows(),
        can_quantize_kv=not any(length % _KV_BLOCK for length in head_lengths)
        and not keys.number(_LATENT),
        is_recurrent=any(keys.number(key) for key in _RECURRENT_KEYS),
        n_layer=keys.number("block_count"),
        embedding_bytes=int(weights_bytes * min(1.0, n_vocab * n_embd / max(1, n_params))),
        expert_bytes=int(weights_bytes * experts),
    )


def with_tensors(shape: Shape, sizes: Mapping[str, int]) -> Shape:
    """Return `shape` with exact values, given the size (bytes) of each tensor by name."""
    experts = {name: size for name, size in sizes.items() if _EXPERT_WEIGHT.search(name)}
    expert_bytes = sum(experts.values())
    used = shape.used_expert_bytes / shape.expert_bytes if shape.expert_bytes else 1.0
    unread = sizes.get("token_embd.weight", 0) if "output.weight" in sizes else 0
    layers = (size for name, size in sizes.items() if name.startswith("blk.") and name not in experts)
    return msgspec.structs.replace(
        shape,
        weights_bytes_per_token=shape.weights_bytes - unread - int(expert_bytes * (1.0 - used)),
        embedding_bytes=sizes.get("output.weight", shape.embedding_bytes),
        expert_bytes=expert_bytes,
        unread_bytes=unread,
        layer_tensor_bytes=max(layers, default=0),
    )


def make_buffers(
    shape: Shape, n_cells: int, kv_type: str, *, n_seq_max: int, n_ubatch: int, n_outputs: int
) -> Buffers:
    """Estimate a context's memory. Of `n_ubatch` tokens in a micro-batch, `n_outputs` have logits."""
    n_cells = round_up_cells(n_cells)
    kv_bytes = int(n_cells * shape.kv_elements * _KV_BYTES[kv_type])
    logits = shape.logits_bytes(n_outputs) + 8 * shape.n_embd * n_ubatch
    middle = 4 * n_ubatch * (3 * shape.n_ff + 3 * shape.n_embd + shape.n_query)
    masks = 2 * n_ubatch * n_cells * (2 if shape.has_windows else 1)
    return Buffers(
        n_ctx=n_cells,
        n_parallel=n_seq_max,
        kv_type=kv_type,
        weights_bytes=shape.weights_bytes,
        kv_bytes=kv_bytes + 4 * shape.state_elements * n_seq_max,
        kv_per_1000_bytes=int(1000 * shape.kv_elements * _KV_BYTES[kv_type]),
        compute_bytes=max(logits, middle + masks) + shape.logits_bytes(n_seq_max),
    )


def outputs_without_memory(shape: Shape, n_ubatch: int) -> int:
    """Return how many tokens of a micro-batch may have logits without a larger compute buffer.

    llama.cpp computes logits after the layers, in the same memory, as `make_buffers` assumes.
    """
    return n_ubatch * (3 * shape.n_ff + shape.n_embd + shape.n_query) // max(1, shape.n_vocab)


def round_up_cells(n_cells: int) -> int:
    """Round a number of cells up as llama.cpp does."""
    return (n_cells + CELL_STEP - 1) // CELL_STEP * CELL_STEP


class _Keys:
    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        self.architecture = str(metadata.get("general.architecture", ""))

    def of(self, name: str, default: int = 0) -> int:
        """Return the value of the key `name` if it is an integer of at least 0, otherwise `default`."""
        value = self._metadata.get(name)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        return int(value) if is_count else default  # type: ignore[call-overload]

    def number(self, key: str, default: int = 0) -> int:
        return self.of(f"{self.architecture}.{key}", default)

    def per_layer(self, key: str) -> list[int]:
        """Return the value of `key` per layer, repeating a value for all layers; [] without the key."""
        n_layer = max(1, self.number("block_count"))
        value = self._metadata.get(f"{self.architecture}.{key}")
        if isinstance(value, tuple):
            numbers = [n if isinstance(n, int) and n >= 0 else 0 for n in value]
            return (numbers + [0] * n_layer)[:n_layer]
        return [self.number(key)] * n_layer if self.number(key) else []

    def head_lengths(self, n_heads: int) -> tuple[int, ...]:
        """Compute `Shape.head_lengths` from the metadata."""
        usual = self.number("embedding_length") // n_heads if n_heads else 0
        plain = [self.number(f"attention.{vector}_length", usual) for vector in ("key", "value")]
        other_lengths = (self.number(key) for key in _OTHER_HEADS)
        return (*plain, *filter(None, other_lengths))

    def has_windows(self) -> bool:
        """Return whether some layers have a sliding window."""
        pattern = self._metadata.get(f"{self.architecture}.attention.sliding_window_pattern")
        window = self.number("attention.sliding_window")
        if window and isinstance(pattern, tuple):
            return any(pattern)
        return self.architecture in _WINDOWED and (window > 0 or self.architecture in _WINDOW_DEFAULTS)


def _cache_sizes(keys: _Keys, head_lengths: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Compute `Shape.kv_rows` and `Shape.state_elements` from the metadata."""
    n_layer = max(0, keys.number("block_count") - keys.number("attention.shared_kv_layers"))
    k_length, v_length = head_lengths[:2]
    if keys.number(_LATENT):  # the cache has only K, of which V is a part
        v_length = 0
    kv_heads = keys.per_layer("attention.head_count_kv") or keys.per_layer("attention.head_count")
    kv_heads = (kv_heads or [0] * n_layer)[:n_layer]
    rows = (n * length for n in kv_heads for length in (k_length, v_length))
    return tuple(row for row in rows if row), _state_elements(keys) * kv_heads.count(0)


def _state_elements(keys: _Keys) -> int:
    """Return the size (float32 elements) of a recurrent layer's state: Mamba or short convolution."""
    inner, n_state = keys.number("ssm.inner_size"), keys.number("ssm.state_size")
    kernel, groups = keys.number("ssm.conv_kernel"), keys.number("ssm.group_count")
    convolution = max(0, keys.number("shortconv.l_cache") - 1) * keys.number("embedding_length")
    return max(0, kernel - 1) * (inner + 2 * groups * n_state) + n_state * inner + convolution


def _expert_share(keys: _Keys, n_params: int) -> float:
    count = keys.number("expert_count")
    n_layer = max(0, keys.number("block_count") - keys.number("leading_dense_block_count"))
    length = keys.number("expert_feed_forward_length") or keys.number("feed_forward_length")
    experts = n_layer * count * 3 * keys.number("embedding_length") * length
    return min(1.0, experts / n_params) if n_params else 0.0


def _share_unused(keys: _Keys) -> float:
    count, used = keys.number("expert_count"), keys.number("expert_used_count")
    return 1 - used / count if count and used < count else 0.0
