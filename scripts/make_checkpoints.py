"""Run transformers on tiny checkpoints of every family and store the results for the tests.

    python -m venv env && env/bin/pip install torch transformers
    env/bin/python scripts/make_checkpoints.py

Weights are derived from the tensors' names (`tests/made/made_checkpoints.py`), so only config.json,
shapes and logits are stored, in `tests/models/converting/golden`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers as hf
from PIL import Image
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/made"))
import made_checkpoints as made

SIZE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": made.N_VOCAB,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = SIZE | {"num_key_value_heads": 2}
GEMMA = GROUPED | {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 24,
    "num_hidden_layers": 7,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 256,
    "long_factor": [1.0, 2.0],
    "short_factor": [1.0, 1.5],
}

CONFIGS = {
    "llama2": hf.LlamaConfig(**SIZE),
    "llama3": hf.LlamaConfig(**GROUPED, tie_word_embeddings=True, rope_parameters=LLAMA3),
    "llama-linear": hf.LlamaConfig(
        **GROUPED, rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    ),
    "mistral": hf.MistralConfig(**GROUPED, head_dim=16, sliding_window=None),
    "smollm3": hf.SmolLM3Config(**GROUPED | {"num_hidden_layers": 5}),
    "qwen2": hf.Qwen2Config(**GROUPED, tie_word_embeddings=True),
    "qwen2-yarn": hf.Qwen2Config(
        **GROUPED,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen3": hf.Qwen3Config(**GROUPED, head_dim=16),
    "olmo2": hf.Olmo2Config(**GROUPED),
    "gemma": hf.GemmaConfig(**GROUPED, head_dim=16),
    "gemma2": hf.Gemma2Config(**GEMMA),
    "gemma3": hf.Gemma3TextConfig(**GEMMA),
    "phi3": hf.Phi3Config(**GROUPED),
    "phi4-mini": hf.Phi3Config(
        **GROUPED | {"max_position_embeddings": 512},
        rope_parameters=LONG,
        original_max_position_embeddings=256,
    ),
}


VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 8,
}
QWEN = GROUPED | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}
QWEN_VISION = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
}
#: Vision models, whose rows for `made.picture` are stored too.
SEEING = {
    "gemma3-pictures": hf.Gemma3Config(
        text_config=hf.Gemma3TextConfig(**GEMMA).to_dict(),
        vision_config=VISION | {"model_type": "siglip_vision_model", "vision_use_head": False},
        mm_tokens_per_image=16,
        image_token_index=5,
    ),
    "smolvlm": hf.SmolVLMConfig(
        text_config=hf.LlamaConfig(**GROUPED).to_dict(),
        vision_config=VISION,
        scale_factor=2,
        image_token_id=5,
        pad_token_id=0,
    ),
    "qwen2.5-vl": hf.Qwen2_5_VLConfig(
        text_config=QWEN | {"model_type": "qwen2_5_vl_text"},
        vision_config=QWEN_VISION | {"fullatt_block_indexes": [1, 3], "window_size": 112},
    ),
    "qwen3-vl": hf.Qwen3VLConfig(
        text_config=QWEN | {"head_dim": 8, "model_type": "qwen3_vl_text"},
        vision_config=QWEN_VISION | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]},
    ),
}


def rows_of(name: str, model: torch.nn.Module) -> np.ndarray:
    """Return the embedding rows of a picture; Qwen3's have the deepstack features appended."""
    if name.startswith("qwen"):
        half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        reader = hf.Qwen2VLImageProcessor(patch_size=16, merge_size=2, do_resize=False, **half)
        inputs = reader(images=[Image.fromarray(made.picture(128))], return_tensors="pt")
        inputs = {"pixel_values": inputs["pixel_values"], "image_grid_thw": inputs["image_grid_thw"]}
    else:
        values = made.picture(64).transpose(2, 0, 1)[None] / 127.5 - 1
        pixels = torch.tensor(values, dtype=torch.float32)
        inputs = {"pixel_values": pixels[None] if name == "smolvlm" else pixels}
    with torch.no_grad():
        features = model.get_image_features(**inputs)
    rows = torch.cat(list(getattr(features, "pooler_output", features)))
    deep = [
        torch.cat(list(layer)) if isinstance(layer, tuple) else layer
        for layer in getattr(features, "deepstack_features", None) or ()
    ]
    return torch.cat([rows.reshape(-1, SIZE["hidden_size"]), *deep], dim=-1).numpy()


def logits_of(name: str, config: object) -> tuple[dict, np.ndarray, np.ndarray | None]:
    """Save a model of this config, replace its weights by ours, and run it on tokens and a picture.

    Return config and shapes, the stored rows of logits, and the picture's rows (None without vision).
    """
    auto = hf.AutoModelForImageTextToText if name in SEEING else hf.AutoModelForCausalLM
    with tempfile.TemporaryDirectory() as folder:
        auto.from_config(config).save_pretrained(folder)
        weights_file = Path(folder) / "model.safetensors"
        with safe_open(weights_file, "numpy") as file:
            shapes = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        tensors = {key: made.weights(key, tuple(shape)) for key, shape in shapes.items()}
        raw = bytearray(made.safetensors(tensors))
        head = int.from_bytes(raw[:8], "little")
        about = {"__metadata__": {"format": "pt"}} | json.loads(raw[8 : 8 + head])
        text = json.dumps(about).encode()
        text += b" " * (-len(text) % 8)
        weights_file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(raw[8 + head :]))
        model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        saved = json.loads((Path(folder) / "config.json").read_text())
    with torch.no_grad():
        rows = model(torch.tensor([made.token_ids()])).logits[0].numpy()
    seen = None
    if name in SEEING:
        seen = rows_of(name, model)
        print(f"{name:16} {seen.shape} of size {np.abs(seen).max():.2f}")
    print(f"{name:16} {rows.shape} of size {np.abs(rows).max():.2f}")
    return {"config": saved, "tensors": shapes}, rows[list(made.KEPT)], seen


def main() -> None:
    """Write a JSON file for each family, and one file with the logits of all families."""
    made.GOLDEN.mkdir(exist_ok=True)
    configs = CONFIGS | SEEING
    names = sys.argv[1:] or list(configs)
    logits_file = made.GOLDEN / "logits.npz"
    arrays = dict(np.load(logits_file)) if logits_file.exists() else {}
    for name in names:
        about, arrays[name], rows = logits_of(name, configs[name])
        if rows is not None:
            arrays[f"{name} rows"] = rows
        (made.GOLDEN / f"{name}.json").write_text(json.dumps(about, indent=1) + "\n")
    np.savez_compressed(logits_file, **arrays)


if __name__ == "__main__":
    main()
