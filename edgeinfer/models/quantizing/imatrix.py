"""Make, find and check importance matrices in llama.cpp's GGUF form.

For a tensor `NAME` it has `NAME.in_sum2` (sums of squared activations, one row an expert) and
`NAME.counts`.
"""

from __future__ import annotations

from pathlib import Path

from edgeinfer.errors import InvalidGgufError, QuantizeError
from edgeinfer.models import gguf
from edgeinfer.models.gguf import TensorInfo
from edgeinfer.models.progress import Job
from edgeinfer.models.quantizing import children
from edgeinfer.system import paths

_SUMS, _COUNTS = ".in_sum2", ".counts"

#: (tensor's name, offset and number of the sums, then of the counts); offsets in bytes.
Span = tuple[str, int, int, int, int]


def spans(path: Path) -> list[Span]:
    """Every tensor's figures in the importance matrix at `path`.

    Raises InvalidGgufError when it is no GGUF, or has no figures, or their shapes do not fit.
    """
    header = gguf.read_header(path)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    found = [
        _span(name.removesuffix(_SUMS), sums, tensors.get(name.removesuffix(_SUMS) + _COUNTS), path)
        for name, sums in tensors.items()
        if name.endswith(_SUMS)
    ]
    if not found:
        raise InvalidGgufError(
            f"{path} is no importance matrix: it has no tensors called …{_SUMS}",
            hint="take the one in GGUF form (imatrix.gguf)",
        )
    return found


def shipped_text() -> Path:
    """What a model reads where no text is given: prose, talk, code and lists, none of it scored."""
    return paths.shipped_file("calibration.txt")


def make(model: Path, text: Path, target: Path, job: Job, skipped_tokens: int = 0) -> int:
    """Write the importance matrix of `model` for `text`; how many tokens of it were read.

    The first `skipped_tokens` are left out where enough is left without. Raises QuantizeError,
    InterruptedByUser.
    """
    job.begin("weighing", model.name)
    arguments = (str(model), str(text), str(target), str(skipped_tokens))
    said = children.follow("edgeinfer.runtime.helpers.importance", *arguments, job=job)
    if said["event"] == "error":
        raise QuantizeError(f"no importance matrix of {model.name} can be made: {said['message']}")
    return int(said["n_tokens"])


def _span(name: str, sums: TensorInfo, counts: TensorInfo | None, path: Path) -> Span:
    fits = counts is not None and counts.n_elements > 0 and sums.n_elements % counts.n_elements == 0
    if counts is None or not fits or (sums.type, counts.type) != ("F32", "F32"):
        raise InvalidGgufError(f"{path}: the figures of {name} do not fit each other")
    return name, sums.offset, sums.n_elements, counts.offset, counts.n_elements
