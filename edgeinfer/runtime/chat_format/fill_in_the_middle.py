"""Build a fill-in-the-middle prompt: `prefix TEXT suffix TEXT middle`.

With other files it has the form of a repository, as these models were trained: the repository's name,
each file's name and text, and the file to complete last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgeinfer.errors import InvalidRequestError
from edgeinfer.runtime.requests import Infill, InfillFile

if TYPE_CHECKING:
    from edgeinfer.runtime.llama.vocab import FimTokens, Vocab

_REPO = "repository\n"
_FILE = "file\n"
#: Between files of a model that has no token for it.
_RULE = "\n\n--- {name} ---\n\n"


def infill_tokens(gap: Infill, vocab: Vocab, room: int) -> list[int]:
    """Return a prompt of at most `max_tokens`. Raises InvalidRequestError.

    Whole files are dropped first, then the text furthest from the cursor.
    """
    fim = vocab.fim
    if fim is None:
        raise InvalidRequestError(
            "this model does not support fill-in-the-middle: its vocabulary has no tokens for it",
            param="infill",
        )
    start = [vocab.bos] if vocab.adds_bos and vocab.bos >= 0 else []
    left = max(0, room - len(start) - 3)
    before, behind = vocab.tokenize(gap.prefix), vocab.tokenize(gap.suffix)
    behind = behind[: max(left // 4, left - len(before))]
    before = before[max(0, len(before) - (left - len(behind))) :]
    files = _files(gap.files, vocab, fim, left - len(before) - len(behind))
    return [*start, *files, fim.prefix, *before, fim.suffix, *behind, fim.middle]


def _files(files: tuple[InfillFile, ...], vocab: Vocab, fim: FimTokens, room: int) -> list[int]:
    head = [fim.repo, *vocab.tokenize(_REPO)] if fim.repo >= 0 else []
    tail = [fim.file, *vocab.tokenize(_FILE)] if fim.file >= 0 else []
    room -= len(head) + len(tail)
    taken: list[list[int]] = []
    for file in reversed(files):
        tokens = _file(file, vocab, fim)
        if len(tokens) > room:
            break
        room -= len(tokens)
        taken.append(tokens)
    if not taken:
        return []
    return [*head, *(token for tokens in reversed(taken) for token in tokens), *tail]


def _file(file: InfillFile, vocab: Vocab, fim: FimTokens) -> list[int]:
    if fim.file < 0:
        return vocab.tokenize(_RULE.format(name=file.name) + file.text)
    return [fim.file, *vocab.tokenize(f"{file.name}\n{file.text}")]
