"""What a begun line may become: commands, their arguments, and `@paths`. Both fronts ask here."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from edgeinfer.chat import attachments, presets
from edgeinfer.chat.commands import slash
from edgeinfer.platform import places

_MENTION = re.compile(r'(?<!\S)@"?([^\s"]*)$')

#: Completions shown at most.
LIMIT = 60


class Completion(msgspec.Struct, frozen=True):
    """Replaces the last `length` characters before the cursor by `text`; `whole` completes the line."""

    text: str
    length: int
    label: str
    summary: str = ""
    whole: bool = False


#: Names an argument of this kind can have, with a word about each.
Names = Mapping[slash.Kind, Callable[[], Sequence[tuple[str, str]]]]


def complete(before: str, names: Names, cwd: Path | None = None) -> list[Completion]:
    """Return completions of the text before the cursor; none when it is complete already."""
    if slash.is_command(before) or before == "/":
        word, space, argument = before.partition(" ")
        return _argument(word, argument, names, cwd) if space else _name(word)
    mention = _MENTION.search(before)
    if mention is None:
        return []
    return [_path(p, len(mention[1])) for p in attachments.complete(mention[1], cwd, LIMIT)]


def _name(word: str) -> list[Completion]:
    found = slash.complete_name(word)
    if word[1:] in slash.BY_NAME and len(found) == 1:
        return []
    return [
        Completion(
            text=f"/{c.name}" + (" " if c.argument else ""),
            length=len(word),
            label=f"/{c.name} {c.argument}".rstrip(),
            summary=c.summary,
            whole=not c.argument or (c.argument.startswith("[") and word[1:] == c.name),
        )
        for c in found
    ]


def _argument(word: str, argument: str, names: Names, cwd: Path | None) -> list[Completion]:
    command = slash.BY_NAME.get(word[1:])
    if command is None:
        return []
    if command.kind == "path":
        return [_path(p, len(argument)) for p in attachments.complete(argument, cwd, LIMIT)]
    given = names.get(command.kind) or _OURS.get(command.kind)
    found = given() if given else ()
    return [
        Completion(name, len(argument), name, summary, whole=True)
        for name, summary in found
        if name.lower().startswith(argument.lower()) and name != argument
    ][:LIMIT]


def _path(path: str, length: int) -> Completion:
    return Completion(path, length, path, "folder" if path.endswith("/") else "")


def _commands() -> Sequence[tuple[str, str]]:
    return [(c.name, c.summary) for c in slash.COMMANDS]


def _settings() -> Sequence[tuple[str, str]]:
    return [(f"{option.label} ", option.help) for option in presets.OPTIONS.values()]


def _adapters() -> Sequence[tuple[str, str]]:
    try:
        files = sorted(os.listdir(places.adapters()))
    except OSError:
        files = []
    names = [(file.removesuffix(".gguf"), "pulled") for file in files if file.endswith(".gguf")]
    return [*names, ("none", "the model alone")]


def _copies() -> Sequence[tuple[str, str]]:
    return [("code", "the last code block"), ("all", "the conversation as Markdown")]


_OURS: Names = {"command": _commands, "setting": _settings, "copy": _copies, "adapter": _adapters}
