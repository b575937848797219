"""What a model needs in memory, from its header alone, and what this machine has.

The KV cache follows llama.cpp's own arithmetic (per-layer head counts, sliding windows, shared layers,
recurrent state); the compute buffer is a fit to what llama.cpp reserves for a full micro-batch.
`docs/models.md` holds the measured error.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from edgeinfer.catalog.ggml_types import TENSOR_TYPES
from edgeinfer.catalog.gguf import GgufHeader
from edgeinfer.runtime.loading.choices import choose_ubatch

#: Every so many layers one attends to the whole context, the others to the window; (period, whether the
#: whole one comes first). llama.cpp has these in its model code for architectures whose files do not
#: say.
_WINDOW_PERIODS: dict[str, tuple[int, bool]] = {
    "gemma2": (2, False),
    "gemma3": (6, False),
    "gemma3n": (5, False),
    "gemma-embedding": (6, False),
    "cohere2": (4, False),
    "exaone4": (4, False),
    "gpt-oss": (2, False),
    "llama4": (4, False),
    "olmo2": (4, False),
    "plamo3": (8, False),
    "smallthinker": (4, True),
    "modern-bert": (3, True),
}
_WINDOW_DEFAULTS = {"gemma2": 4096, "exaone4": 4096, "llama4": 8192}
_BYTES_OF = {kind.name.lower(): kind.bytes / kind.block for kind in TENSOR_TYPES.values()}
#: llama.cpp pads the cache to this many cells.
_CELLS = 256
#: What the engine makes its context with (`runtime.loading.load`, which cannot be imported here: it
#: loads llama.cpp).
_BATCH_TOKENS = 512
_SPARE_SEQUENCES = 16
_OUTPUTS_PER_SEQUENCE = 8


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """What one layer keeps for every token: elements of K and V. `window` 0 sees the whole context."""

    k_elements: int
    v_elements: int
    window: int = 0
    state_elements: int = 0


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes a loaded model takes. `kv_per_1000_bytes` is the growth for 1,000 more tokens of
    context.
    """

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


class MachineMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What this process may still use, and what limits it. Bytes."""

    total_bytes: int
    available_bytes: int
    reason: str


def estimate(
    header: GgufHeader,
    n_ctx: int = 0,
    kv_type: str = "f16",
    *,
    n_parallel: int = 1,
    n_ubatch: int = 512,
    n_outputs: int = 0,
    weights_bytes: int = 0,
    whole_windows: bool = False,
) -> Estimate:
    """The memory of `header`'s model with a context of `n_ctx` tokens (0: what it was trained for).

    `n_parallel` counts sequence ids: each has a row of logits, a recurrent state, and its share of a
    window. `n_outputs` is how many positions of a micro-batch get logits (0: all of them).
    `weights_bytes` replaces the header's own sum when the model is split over several files.
    `whole_windows` is llama.cpp's `swa_full`.
    """
    n_ctx = _padded(n_ctx or header.n_ctx_train or 4096)
    per_element = _BYTES_OF[kv_type]
    kept = layers(header)
    kv = sum(
        _layer_bytes(layer, n_ctx, per_element, n_parallel, n_ubatch, whole_windows) for layer in kept
    )
    growing = sum(
        layer.k_elements + layer.v_elements for layer in kept if not layer.window or whole_windows
    )
    return Estimate(
        n_ctx=n_ctx,
        n_parallel=n_parallel,
        kv_type=kv_type,
        weights_bytes=weights_bytes or header.weights_bytes,
        kv_bytes=kv,
        kv_per_1000_bytes=int(1000 * growing * per_element),
        compute_bytes=_compute_bytes(
            header, n_ctx, n_ubatch, n_outputs or n_ubatch, n_parallel, whole_windows=whole_windows
        ),
    )


def engine_estimate(
    header: GgufHeader,
    n_cells: int = 0,
    kv_type: str = "f16",
    n_parallel: int = 4,
    weights_bytes: int = 0,
) -> Estimate:
    """`estimate` with the context that `runtime.loading.load` makes for `n_parallel` sequences over
    `n_cells` cells together.

    A test compares the two on both real models.
    """
    n_cells = _padded(n_cells or header.n_ctx_train or 4096)
    recurrent = header.number(header.own("ssm.state_size")) > 0
    n_seq_max = n_parallel if recurrent else min(256, n_parallel + _SPARE_SEQUENCES)
    n_batch = min(max(_BATCH_TOKENS, n_parallel), n_cells)
    return estimate(
        header,
        n_cells,
        kv_type,
        n_parallel=n_seq_max,
        n_ubatch=choose_ubatch(
            n_batch, n_seq_max, header.number("general.file_type", -1), kv_type
        ).value,
        n_outputs=max(n_seq_max, min(n_batch, _OUTPUTS_PER_SEQUENCE * n_parallel)),
        weights_bytes=weights_bytes,
        whole_windows=True,
    )


def layers(header: GgufHeader) -> list[Layer]:
    """Every layer that keeps something. Empty for a model without attention keys: then there is no
    cache to count.
    """
    n_layer = header.n_layer
    heads = _per_layer(header, "attention.head_count", n_layer, 0)
    kv_heads = _per_layer(header, "attention.head_count_kv", n_layer, None) or heads or [0] * n_layer
    n_heads = max(heads, default=0)
    default_length = header.n_embd // n_heads if n_heads else 0
    k_length = header.number(header.own("attention.key_length"), default_length)
    v_length = header.number(header.own("attention.value_length"), default_length)
    if header.number(header.own("attention.kv_lora_rank")):  # latent attention: V is a view of K
        v_length = 0
    windows = _windows(header, n_layer)
    state = _state_elements(header)
    own = n_layer - header.number(header.own("attention.shared_kv_layers"))
    return [
        Layer(
            k_elements=kv_heads[i] * k_length,
            v_elements=kv_heads[i] * v_length,
            window=windows[i],
            state_elements=state if not kv_heads[i] else 0,
        )
        for i in range(max(0, own))
    ]


def _per_layer(header: GgufHeader, key: str, n_layer: int, default: int | None) -> list[int]:
    """A value that is one number for all layers, or an array with one each. [] when absent and
    `default` is None.
    """
    value = header.metadata.get(header.own(key), default)
    if isinstance(value, tuple):
        numbers = [n if isinstance(n, int) and n >= 0 else 0 for n in value]
        return (numbers + [0] * n_layer)[:n_layer]
    if isinstance(value, int) and value >= 0:
        return [value] * n_layer
    return []


def _windows(header: GgufHeader, n_layer: int) -> list[int]:
    architecture = header.architecture
    window = header.number(
        header.own("attention.sliding_window"), _WINDOW_DEFAULTS.get(architecture, 0)
    )
    pattern = header.metadata.get(header.own("attention.sliding_window_pattern"))
    if window and isinstance(pattern, tuple):
        return [window if i < len(pattern) and pattern[i] else 0 for i in range(n_layer)]
    if not window or architecture not in _WINDOW_PERIODS:
        return [0] * n_layer
    period, whole_first = _WINDOW_PERIODS[architecture]
    if isinstance(pattern, int) and pattern > 0:
        period = pattern
    whole = 0 if whole_first else period - 1
    return [0 if i % period == whole else window for i in range(n_layer)]


def _state_elements(header: GgufHeader) -> int:
    """32-bit floats of a recurrent layer's state, for one sequence (Mamba's keys)."""
    inner, n_state = (
        header.number(header.own("ssm.inner_size")),
        header.number(header.own("ssm.state_size")),
    )
    kernel, groups = (
        header.number(header.own("ssm.conv_kernel")),
        header.number(header.own("ssm.group_count")),
    )
    return max(0, kernel - 1) * (inner + 2 * groups * n_state) + n_state * inner


def _layer_bytes(
    layer: Layer, n_ctx: int, per_element: float, n_parallel: int, n_ubatch: int, whole_windows: bool
) -> int:
    cells = n_ctx
    if layer.window and not whole_windows:
        cells = min(n_ctx, _padded(layer.window * n_parallel + n_ubatch))
    return (
        int(cells * (layer.k_elements + layer.v_elements) * per_element)
        + 4 * layer.state_elements * n_parallel
    )


def _compute_bytes(
    header: GgufHeader,
    n_ctx: int,
    n_ubatch: int,
    n_outputs: int,
    n_parallel: int,
    *,
    whole_windows: bool,
) -> int:
    """llama.cpp's compute and output buffers: the larger of the logits' end of the graph and a layer's
    middle.
    """
    n_vocab, n_embd = header.n_vocab, header.n_embd
    logits = 4 * (n_outputs * n_vocab + 2 * n_embd * n_ubatch)
    middle = 4 * n_ubatch * (3 * _feed_forward(header) + 3 * n_embd + _query_elements(header))
    widest = max(_windows(header, header.n_layer), default=0)
    window = n_ctx if whole_windows else min(n_ctx, _padded(widest * n_parallel + n_ubatch))
    masks = 2 * n_ubatch * (n_ctx + (window if widest else 0))
    return max(logits, middle + masks) + 4 * n_vocab * n_parallel


def _feed_forward(header: GgufHeader) -> int:
    """The widest feed-forward row a token goes through: a dense one, or those of the experts used."""
    dense = max(_per_layer(header, "feed_forward_length", max(1, header.n_layer), 0), default=0)
    used = header.number(header.own("expert_used_count")) * header.number(
        header.own("expert_feed_forward_length")
    )
    return max(dense, used)


def _query_elements(header: GgufHeader) -> int:
    heads = max(_per_layer(header, "attention.head_count", max(1, header.n_layer), 0), default=0)
    length = header.number(header.own("attention.key_length"))
    return heads * length if length else header.n_embd


def _padded(cells: int) -> int:
    return (cells + _CELLS - 1) // _CELLS * _CELLS


def machine_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> MachineMemory:
    """What the kernel says is available, or less where a control group limits us. Zero where nobody
    says (no Linux).
    """
    info = _meminfo(proc / "meminfo")
    total, available = info.get("MemTotal", 0), info.get("MemAvailable", 0)
    found = MachineMemory(
        total_bytes=total, available_bytes=available, reason="MemAvailable of /proc/meminfo"
    )
    for limit, used, place in _limits(proc / "self/cgroup", cgroups):
        left = max(0, limit - used)
        if limit < total and left < found.available_bytes:
            found = MachineMemory(
                total_bytes=limit, available_bytes=left, reason=f"the limit in {place}"
            )
    return found


def _meminfo(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {
        words[0].rstrip(":"): int(words[1]) * 1024
        for words in pairs
        if len(words) > 1 and words[1].isdecimal()
    }


def _limits(own: Path, cgroups: Path) -> list[tuple[int, int, Path]]:
    """(limit, unreclaimable use, file) of our control group and its ancestors, versions 2 and 1."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers == "":
            found += _limits_of(cgroups, place, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            found += _limits_of(
                cgroups / "memory",
                place,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
    return found


def _limits_of(
    root: Path, place: str, limit_file: str, used_file: str, cache_key: str
) -> list[tuple[int, int, Path]]:
    found = []
    folder = root / place.lstrip("/")
    while folder == root or root in folder.parents:
        limit, used = _number(folder / limit_file), _number(folder / used_file)
        if limit is not None:
            found.append(
                (
                    limit,
                    max(0, (used or 0) - _stat(folder / "memory.stat", cache_key)),
                    folder / limit_file,
                )
            )
        folder = folder.parent
    return found


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _stat(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key} ")), 0)
