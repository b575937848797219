"""LoRA adapters as PEFT writes them, for the checkpoints of `made_checkpoints`."""

import json
from pathlib import Path

import numpy as np
from made_checkpoints import golden, safetensors, weights

RANK = 4
ALPHA = 6


def make_peft(folder: Path, name: str, modules: tuple[str, ...], **config: object) -> Path:
    """Write an adapter of the golden checkpoint `name` for every module whose name ends with one of `modules`."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(modules)}
    about |= {"bias": "none", "use_dora": False, "use_rslora": False}
    (folder / "adapter_config.json").write_text(json.dumps(about | config))
    tensors = {}
    for module, (a, b) in pairs(name, modules).items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    (folder / "adapter_model.safetensors").write_bytes(safetensors(tensors))
    return folder


def pairs(name: str, modules: tuple[str, ...]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return A [rank, in] and B [out, rank] of each adapted module."""
    factors = {}
    for tensor, shape in golden(name)["tensors"].items():
        module = tensor.removesuffix(".weight")
        if module.endswith(modules) and tensor.endswith(".weight"):
            factors[module] = (
                weights(f"{module}.lora_A", (RANK, shape[1])),
                weights(f"{module}.lora_B", (shape[0], RANK)) / 2,
            )
    return factors
