"""Which tensor of a checkpoint becomes which of a GGUF, from what, and of what type."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from edgeinfer.errors import ConversionError
from edgeinfer.models.converting import changes
from edgeinfer.models.converting.changes import Change
from edgeinfer.models.converting.checkpoint import Checkpoint
from edgeinfer.models.converting.families import Family, Values, lookup, needed
from edgeinfer.models.gguf import MAX_LAYERS

_EXPERT = re.compile(r"(.*\.layers\.\d+\..*experts)\.(\d+)\.(\w+)\.weight")
#: Small, and read one value at a time or summed: of full precision in any file.
_EXACT = ("_norm.weight", "ffn_gate_inp.weight", "token_types.weight", "ffn_gate_inp_shexp.weight")
_VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal")


class Planned(msgspec.Struct, frozen=True):
    """One tensor of the result: the checkpoint's tensors it is made of, one after the other.

    `exact` wants float32 whatever the file's type. `shape` has the slowest dimension first.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    change: Change | None
    exact: bool


def plan(checkpoint: Checkpoint, family: Family, config: Values) -> list[Planned]:
    """Plan every tensor. Raises ConversionError for one that has no place in llama.cpp."""
    import gguf  # 80 ms: the table of names

    arch = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == family.arch)
    table = gguf.get_tensor_name_map(arch, needed(config, "block_count", MAX_LAYERS))
    planned = []
    for name, sources in _grouped(checkpoint, family, config):
        new = table.get_name(plain_name(name), try_suffixes=(".weight", ".bias"))
        if new is None:
            raise ConversionError(
                f"{checkpoint.tensor(sources[0]).name} has no place in llama.cpp's {family.arch}",
                hint="the checkpoint has parts that a model of this family does not have",
            )
        planned.append(_planned(checkpoint, family, new, sources))
    return sorted(planned, key=lambda one: _order(one.name))


def plain_name(name: str) -> str:
    """The tensor's name without what wraps a text model."""
    for prefix, plain in (
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("bert.", ""),
        ("roberta.", ""),
    ):
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def _grouped(
    checkpoint: Checkpoint, family: Family, config: Values
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each tensor's name with itself; the experts' of one layer together, in order."""
    experts: dict[str, dict[int, str]] = {}
    for name in checkpoint.names:
        if name.startswith(_VISION) or name.endswith("rotary_emb.inv_freq") or _dropped(name, family):
            continue
        if config.get("tie_word_embeddings") and name.endswith(("lm_head.weight", "embed_out.weight")):
            continue
        if expert := _EXPERT.fullmatch(name):
            group = f"{expert[1]}.{expert[3]}.weight"
            experts.setdefault(group, {})[int(expert[2])] = name
        else:
            yield name, (name,)
    count = lookup(config, "expert_count")
    for group, members in experts.items():
        if sorted(members) != list(range(count or 0)):
            raise ConversionError(
                f"{group}: {len(members)} experts are there, config.json says {count}"
            )
        yield group, tuple(members[index] for index in sorted(members))


def _dropped(name: str, family: Family) -> bool:
    return any(name.endswith(word) or word in name for word in family.dropped)


def _planned(checkpoint: Checkpoint, family: Family, name: str, sources: tuple[str, ...]) -> Planned:
    first = checkpoint.tensor(sources[0])
    if any(checkpoint.tensor(source).shape != first.shape for source in sources):
        raise ConversionError(f"{first.name} and its fellow experts differ in shape")
    change = change_of(family, name)
    shape = first.shape
    if change is changes.transpose:
        shape = shape[::-1]
    if change is changes.drop_padding_rows:
        shape = (shape[0] - 2, *shape[1:])
    whole = (len(sources), *shape) if len(sources) > 1 else shape
    exact = len(shape) < 2 or name.endswith(_EXACT) or (family.embeds and "position_embd" in name)
    return Planned(name, whole, sources, change, exact)


def change_of(family: Family, name: str) -> Change | None:
    """What the family does to the tensor called `name` in a GGUF."""
    return next((how for end, how in family.changes.items() if _is(name, end)), None)


def _is(name: str, end: str) -> bool:
    """Whether a row's `end` means the tensor: with its kind at the end, or both weight and bias."""
    if end.endswith((".weight", ".bias")):
        return name.endswith(end)
    return re.search(rf"\.{end}\.(weight|bias)$", name) is not None


def _order(name: str) -> tuple[int, int, str]:
    layer = re.match(r"blk\.(\d+)\.", name)
    if layer:
        return 1, int(layer[1]), name
    return (2 if name.startswith("output") else 0), 0, name
