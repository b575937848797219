"""Choose the files that a conversion needs from those of a folder or a repository."""

from __future__ import annotations

import re

from edgeinfer.errors import SourceNotFoundError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
#: Files of a LoRA adapter, as PEFT saves it.
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
#: Types that a conversion can write. llama.cpp's quantizer converts the result to any other type.
DIRECT = ("F32", "F16", "BF16", "Q8_0")
_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
#: Files without weights that a conversion reads.
_CONFIGURATION = (
    CONFIG,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "preprocessor_config.json",
)


def weight_files(paths: list[str]) -> list[str]:
    """Return the safetensors files among a checkpoint's `paths`, which are relative to its folder.

    Raises SourceNotFoundError if a shard is missing.
    """
    if WEIGHTS in paths:
        return [WEIGHTS]
    shards = sorted(path for path in paths if _SHARD.fullmatch(path))
    if not shards:
        return sorted(path for path in paths if path.endswith(".safetensors") and "/" not in path)
    match = _SHARD.fullmatch(shards[0])
    assert match is not None
    expected = [f"model-{index + 1:05}-of-{match[2]}.safetensors" for index in range(int(match[2]))]
    if missing := [name for name in expected if name not in shards]:
        hint = "a file ending in .part or .incomplete is not complete: fetch it again"
        first = ", ".join(missing[:4])
        raise SourceNotFoundError(
            f"{len(missing)} of {len(expected)} shards are missing: {first}", hint=hint
        )
    return expected


def checkpoint_files(paths: list[str]) -> list[str]:
    """Return which of `paths` to fetch for a conversion; [] if they are not a checkpoint or adapter."""
    weights = weight_files(paths) if CONFIG in paths else []
    # some programs save the base model's config.json, too
    if weights in ([], [ADAPTER_WEIGHTS]) and {ADAPTER_CONFIG, ADAPTER_WEIGHTS} <= set(paths):
        return [ADAPTER_CONFIG, ADAPTER_WEIGHTS]
    return [*(name for name in _CONFIGURATION if name in paths), *weights] if weights else []
