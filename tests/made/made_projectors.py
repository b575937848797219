"""Projectors of random weights: a small vision transformer in front of a text model's embeddings."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from made_families import finish, read_keys


@dataclass(frozen=True)
class Encoder:
    """Sizes of a vision transformer; the tests' is small."""

    width: int = 128
    layers: int = 2
    heads: int = 4
    feed_forward: int = 256


#: Tokens of SmolLM2 → tokens that an idefics3 projector puts around a picture.
IDEFICS3_TOKENS = {
    "<file_sep>": "<fake_token_around_image>",
    "<gh_stars>": "<global-img>",
    "<filename>": "<row_1_col_1>",
}


def make_projector(
    path: Path,
    kind: str,
    n_text: int,
    *,
    image: int = 256,
    patch: int = 16,
    merge: int = 2,
    longest: int = 0,
    encoder: Encoder = Encoder(),
) -> Path:
    """Write a projector of `kind` ("gemma3", "idefics3", "lfm2", "qwen2vl_merger") to width `n_text`.

    Pictures have `image` pixels a side, and one row for `merge` × `merge` patches; with `longest` larger
    ones become tiles.
    """
    rng = np.random.default_rng(5)

    def random(*shape: int, scale: float = 0.0) -> npt.NDArray[np.float32]:
        scale = scale or 1 / np.sqrt(np.prod(shape[1:]))
        return (rng.standard_normal(shape, np.float32) * scale).astype(np.float32)

    def matrix(name: str, *shape: int) -> None:
        writer.add_tensor(f"{name}.weight", random(*shape).astype(np.float16))

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(encoder.width, np.float32))
        writer.add_tensor(f"{name}.bias", random(encoder.width, scale=0.02))

    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", kind)
    writer.add_bool("clip.use_gelu", True)
    sizes = {
        "embedding_length": encoder.width,
        "attention.head_count": encoder.heads,
        "feed_forward_length": encoder.feed_forward,
        "block_count": encoder.layers,
        "projection_dim": n_text,
        "image_size": image,
        "patch_size": patch,
    }
    if longest:
        sizes["preproc_image_size"] = longest
    if kind != "qwen2vl_merger":
        sizes["projector.scale_factor"] = merge
    for key, value in sizes.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", [0.5] * 3)
    matrix("v.patch_embd", encoder.width, 3, patch, patch)
    if kind == "qwen2vl_merger":
        second = random(encoder.width, 3, patch, patch).astype(np.float16)
        writer.add_tensor("v.patch_embd.weight.1", second)
    else:
        writer.add_tensor("v.patch_embd.bias", random(encoder.width, scale=0.1))
        positions = random((image // patch) ** 2, encoder.width, scale=0.5)
        writer.add_tensor("v.position_embd.weight", positions)
    layer = {f"attn_{name}": (encoder.width, encoder.width) for name in ("q", "k", "v", "out")}
    wide = encoder.feed_forward
    layer |= {"ffn_up": (wide, encoder.width), "ffn_down": (encoder.width, wide)}
    for i in range(encoder.layers):
        for name, shape in layer.items():
            matrix(f"v.blk.{i}.{name}", *shape)
            writer.add_tensor(f"v.blk.{i}.{name}.bias", random(shape[0], scale=0.02))
        norm(f"v.blk.{i}.ln1")
        norm(f"v.blk.{i}.ln2")
    norm("v.post_ln")
    if kind == "gemma3":
        matrix("mm.input_projection", encoder.width, n_text)
        writer.add_tensor("mm.soft_emb_norm.weight", np.ones(encoder.width, np.float32))
    elif kind == "idefics3":
        matrix("mm.model.fc", n_text, encoder.width * merge * merge)
    else:
        wide = encoder.width * merge * merge
        for number, rows in (("1" if kind == "lfm2" else "0", wide), ("2", n_text)):
            matrix(f"mm.{number}", rows, wide)
            writer.add_tensor(f"mm.{number}.bias", random(rows, scale=0.02))
    return finish(writer, path)


def copy_model(
    path: Path,
    source: Path,
    names: dict[str, str] | None = None,
    template: str = "",
    change: Callable[[Any], tuple[Any, Any]] = lambda tensor: (tensor.data, tensor.tensor_type),
) -> Path:
    """Write a copy of a model whose vocabulary has other names for some tokens; of a model without a chat
    template, with that one. `change` gives a tensor's content and type.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, (value, kind, of) in read_keys(reader).items():
        if name == "tokenizer.ggml.tokens" and names:
            value = [names.get(token, token) for token in value]
        if name != "general.architecture":
            writer.add_key_value(name, value, kind, sub_type=of)
    for tensor in reader.tensors:
        data, dtype = change(tensor)
        writer.add_tensor(tensor.name, data, raw_dtype=dtype)
    if template:
        writer.add_chat_template(template)
    return finish(writer, path)
