"""Find and check projectors: the GGUF files (mmproj) that encode pictures for a model."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from edgeinfer.errors import InvalidGgufError
from edgeinfer.models import gguf
from edgeinfer.models.gguf import GgufHeader
from edgeinfer.runtime.options import OTHER_PROJECTOR

_ARCHITECTURE = "clip"
#: Key of a projector's header → largest accepted value. llama.cpp computes sizes from these numbers.
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
#: Maximum number of tiles per side into which a picture is cut; known models use up to 5.
_MOST_TILES = 8
#: Maximum number of patches of a picture: 1600 or, if that is more, 16 times the embedding's width.
#: Known models have up to 15 times the width. The limit exists because the cost of attention is
#: quadratic: 16,384 patches of width 128 took 30 to 60 s.
_PATCHES = 1600
_PATCHES_BY_WIDTH = 16


def is_projector(file_name: str) -> bool:
    """Return whether the name is that of a projector: a GGUF file with "mmproj" in its name."""
    return "mmproj" in file_name.lower() and file_name.lower().endswith(".gguf")


def in_folder_of(model: Path) -> list[Path]:
    """List the projectors in the folder of a model's file, by name."""
    try:
        return sorted(path for path in model.parent.iterdir() if is_projector(path.name))
    except OSError:
        return []


def check(path: str | Path) -> GgufHeader:
    """Return the header of a projector that llama.cpp can load. Raises InvalidGgufError."""
    header = gguf.read_model_header(path, vocabulary=False)
    if header.architecture != _ARCHITECTURE:
        problem = f"{path} is not a projector: architecture {header.architecture!r}"
        raise InvalidGgufError(problem, hint=OTHER_PROJECTOR)
    if header.metadata.get("clip.has_vision_encoder") is not True:
        problem = f"{path} is a projector without a picture encoder"
        raise InvalidGgufError(problem, hint=OTHER_PROJECTOR)
    for key, most in _MOST.items():
        value = header.metadata.get(f"clip.vision.{key}", 1)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise InvalidGgufError(f"{path}: clip.vision.{key} is {value!r} (allowed: 1 to {most})")
    keys = ("image_size", "patch_size", "embedding_length")
    size, patch, width = (header.number(f"clip.vision.{key}", 1) for key in keys)
    n_patches = max(size**2, header.number("clip.vision.image_min_pixels")) // patch**2
    most = max(_PATCHES, _PATCHES_BY_WIDTH * width)
    if n_patches > most:
        problem = f"{path}: the projector makes {n_patches} patches of a picture (allowed: {most})"
        raise InvalidGgufError(problem)
    if patch > size:
        raise InvalidGgufError(
            f"{path}: clip.vision.patch_size is {patch}, more than clip.vision.image_size, {size}"
        )
    if header.number("clip.vision.preproc_image_size") > _MOST_TILES * size:
        problem = f"{path}: the projector makes more than {_MOST_TILES} tiles per side of a picture"
        raise InvalidGgufError(problem)
    return header


def check_fits(path: str | Path, model: GgufHeader) -> None:
    """Raise InvalidGgufError if the projector's output is not as wide as the model's embeddings."""
    width = check(path).number("clip.vision.projection_dim")
    if width != model.n_embd:
        makes = f"{Path(path).name} produces embeddings of {width} numbers"
        problem = f"{makes}, but the model needs {model.n_embd}"
        raise InvalidGgufError(problem, hint=OTHER_PROJECTOR)


def find_fitting(candidates: Iterable[str | Path], model: GgufHeader) -> str:
    """Return the path of the smallest of `candidates` that fits the model; "" if none does."""
    projectors = []
    for path in candidates:
        with suppress(InvalidGgufError):
            check_fits(path, model)
            projectors.append((Path(path).stat().st_size, str(path)))
    return min(projectors)[1] if projectors else ""
