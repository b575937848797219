"""A model's hyperparameters: from config.json to keys of a GGUF."""

from __future__ import annotations

from typing import Any

from edgeinfer.errors import ConversionError
from edgeinfer.models.converting import rope
from edgeinfer.models.converting.changes import Heads
from edgeinfer.models.converting.families import KEYS, Family, Values, lookup, needed


def count_heads(config: Values) -> Heads:
    """The shape of attention. Raises ConversionError when config.json does not say it."""
    n_head = needed(config, "attention.head_count")
    width = needed(config, "embedding_length")
    head_dim = config.get("head_dim")
    head_dim = width // n_head if head_dim is None else int(head_dim)
    n_head_kv = _key_value_heads(config, n_head)
    if not 1 <= n_head_kv <= n_head or head_dim < 1:
        raise ConversionError(
            f"config.json: {n_head} heads, {n_head_kv} of them for keys and values, of {head_dim} each"
        )
    return Heads(n_head, n_head_kv, head_dim)


def _key_value_heads(config: Values, n_head: int) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1  # Falcon 7B, StarCoder
    attention = config.get("attn_config")
    nested = attention.get("kv_n_heads") if isinstance(attention, dict) else None
    words = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
    found = next((config[word] for word in words if config.get(word) is not None), nested)
    return n_head if found is None else int(found)


def metadata(family: Family, config: Values) -> dict[str, Any]:
    """Keys and values under the architecture's name, without its prefix. Raises ConversionError."""
    heads = count_heads(config)
    needed(config, "context_length")
    found: dict[str, Any] = {}
    for key in KEYS:
        value = lookup(config, key.name)
        if value is not None and value is not False:
            found[key.name] = key.kind(value)
    expansion = int(config.get("expansion_ratio") or 4)
    found.setdefault("feed_forward_length", expansion * found["embedding_length"])
    found["attention.head_count_kv"] = heads.n_head_kv
    found["attention.key_length"] = found["attention.value_length"] = heads.head_dim
    if family.arch == "mpt":
        found.setdefault("attention.layer_norm_epsilon", 1e-5)
    if family.rope:
        found |= rope.metadata(config, heads.head_dim)
    if family.extra:
        found |= family.extra(config)
    return found
