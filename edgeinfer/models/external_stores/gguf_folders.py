"""GGUF files of one repository, grouped to models: names, split files, what is missing.

Hugging Face's cache and LM Studio's folders both hold a repository's files under their own names.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from edgeinfer.models import names
from edgeinfer.models.external_stores.model import Found, FoundFile
from edgeinfer.models.external_stores.reading import UnusableError, file_in

#: (path in its repository, quantization or "") → the model's name
Naming = Callable[[str, str], str]
#: the model's name → what to do when it can't be used
Fix = Callable[[str], str]
#: file → the SHA-256 that its name promises, or ""
Promise = Callable[[str], str]


def models(
    ggufs: Iterable[Path],
    folder: Path,
    root: Path,
    *,
    store: str,
    name: Naming,
    fix: Fix,
    promised: Promise = lambda _path: "",
) -> Iterator[Found]:
    """Yield the models among a repository's files, `folder` being its top and `root` its store's.

    A quantization names a model where it is the only one of it; projectors are passed over.
    """
    found = {str(path.relative_to(folder)): path for path in ggufs}
    firsts = {min(_parts(file)): file for file in sorted(found, reverse=True)}
    firsts = {first: file for first, file in firsts.items() if "mmproj" not in first.lower()}
    quants = {first: names.quantization_of(first) for first in firsts}
    count = Counter(quants.values())
    for first, quant in quants.items():
        called = name(first, quant if count[quant] == 1 else "")
        try:
            files = [_file(folder / part, root, promised) for part in _parts(first)]
        except UnusableError as error:
            yield Found(name=called, store=store, problem=error.message, fix=error.hint or fix(called))
            continue
        stamp = max(os.stat(file.path).st_mtime for file in files)
        yield Found(name=called, store=store, files=tuple(files), modified_s=stamp)


def _parts(file: str) -> list[str]:
    folder, slash, last = file.rpartition("/")
    return [f"{folder}{slash}{part}" for part in names.split_names(last)] or [file]


def _file(path: Path, root: Path, promised: Promise) -> FoundFile:
    if not os.path.lexists(path):
        raise UnusableError(f"its part {path.name} is missing")
    real, info = file_in(path, root)
    return FoundFile(path=real, size_bytes=info.st_size, sha256=promised(real))
