"""Projectors: GGUF files that encode pictures for a model; found next to it, checked before use."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from edgeinfer.errors import InvalidGgufError
from edgeinfer.models import gguf
from edgeinfer.models.gguf import GgufHeader

_ARCHITECTURE = "clip"
#: Bounds of the numbers in a projector's header that llama.cpp computes sizes from.
_MOST = {
    "image_size": 4096,
    "patch_size": 256,
    "embedding_length": 1 << 15,
    "feed_forward_length": 1 << 17,
    "attention.head_count": 512,
    "block_count": 512,
    "projection_dim": 1 << 16,
    "preproc_image_size": 4096,
    "preproc_min_tiles": 64,
    "preproc_max_tiles": 256,
    "image_min_pixels": 1 << 24,
}
#: Most tiles a side to which a tiled picture is scaled; models have up to 5.
_MOST_TILES = 8
#: Patches of a picture that any encoder may have, and more by its width: models have up to 15 times the
#: width (HunyuanOCR). Attention takes their square: 16,384 of width 128 took 30 to 60 s.
_PATCHES = 1600
_PATCHES_BY_WIDTH = 16


def is_projector(file_name: str) -> bool:
    """Return whether a file is a projector, judged by the name that llama.cpp's converter gives."""
    return "mmproj" in file_name.lower() and file_name.lower().endswith(".gguf")


def beside(model: Path) -> list[Path]:
    """List the projectors in the model's folder, by name."""
    try:
        return sorted(path for path in model.parent.iterdir() if is_projector(path.name))
    except OSError:
        return []


def check(path: str | Path) -> GgufHeader:
    """Read the header of a projector that llama.cpp can be given. Raises InvalidGgufError."""
    header = gguf.check(path, vocabulary=False)
    if header.architecture != _ARCHITECTURE:
        raise InvalidGgufError(f"{path} is no projector: its architecture is {header.architecture!r}")
    if header.metadata.get("clip.has_vision_encoder") is not True:
        raise InvalidGgufError(f"{path} encodes no pictures")
    for key, most in _MOST.items():
        value = header.metadata.get(f"clip.vision.{key}", 1)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            bounds = f"1 to {most} are possible"
            raise InvalidGgufError(f"{path} says clip.vision.{key} is {value!r}; {bounds}")
    keys = ("image_size", "patch_size", "embedding_length")
    size, patch, width = (header.number(f"clip.vision.{key}", 1) for key in keys)
    n_patches = max(size**2, header.number("clip.vision.image_min_pixels")) // patch**2
    if n_patches > max(_PATCHES, _PATCHES_BY_WIDTH * width):
        raise InvalidGgufError(f"{path} makes too many patches: {n_patches} of width {width}")
    if patch > size:
        raise InvalidGgufError(f"{path} has patches of {patch} pixels in pictures of {size}")
    if header.number("clip.vision.preproc_image_size") > _MOST_TILES * size:
        raise InvalidGgufError(f"{path} cuts pictures into more than {_MOST_TILES} tiles a side")
    return header


def check_fits(path: str | Path, model: GgufHeader) -> None:
    """Raise InvalidGgufError for a projector whose rows are not as wide as the model's embeddings."""
    width = check(path).number("clip.vision.projection_dim")
    if width != model.n_embd:
        makes = f"{Path(path).name} makes rows of {width} numbers"
        raise InvalidGgufError(f"{makes}, and the model reads {model.n_embd}")


def fitting(candidates: Iterable[str | Path], model: GgufHeader) -> str:
    """Return the smallest valid projector that fits the model, or ""."""
    projectors = []
    for path in candidates:
        with suppress(InvalidGgufError):
            check_fits(path, model)
            projectors.append((Path(path).stat().st_size, str(path)))
    return min(projectors)[1] if projectors else ""
