"""The table of `/` commands, their parser and completions; `commander` runs the commands."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from edgeinfer.chat import attachments, presets
from edgeinfer.errors import UsageError
from edgeinfer.platform import paths

#: Kind of a command's argument, which decides the completions offered; "" has no completions.
Kind = Literal["", "model", "path", "prompt", "preset", "adapter", "tools", "theme", "setting", "copy"]


class SlashCommand(msgspec.Struct, frozen=True):
    """A `/` command. `argument` is its argument in the help: "" for none, in [brackets] if optional.

    `kind` selects the completions of the argument.
    """

    name: str
    argument: str
    summary: str
    kind: Kind = ""
    aliases: tuple[str, ...] = ()

    @property
    def usage(self) -> str:
        """Command with the name of its argument: `/open NUMBER`."""
        return f"/{self.name} {self.argument}".rstrip()


class TypedCommand(msgspec.Struct, frozen=True):
    """A parsed command line: the command's main name (not an alias), and the typed argument."""

    name: str
    argument: str = ""


#: Rows of the table of commands: `NAME|ALIAS… ARGUMENT`, summary, and the argument's kind.
_ROWS: tuple[tuple[str, str] | tuple[str, str, Kind], ...] = (
    ("help|?", "commands and keys"),
    ("model|models [NAME]", "switch to another model, or pick one", "model"),
    ("system [TEXT|NAME]", "show or set the system prompt, or a saved one; `none` for none", "prompt"),
    ("save-system NAME", "save the system prompt under a name"),
    ("temp|temperature [NUMBER]", "temperature: 0 always picks the likeliest token"),
    ("set [OPTION VALUE]", "sampling: `/set top-p 0.9`, `top-p default`; `/set` shows all", "setting"),
    ("preset [NAME]", "several sampling options at once", "preset"),
    ("ctx [TOKENS]", "context length; the model is loaded again"),
    ("lora|adapters [NAME[:SCALE] …]", "apply only these LoRA adapters; `none` for none", "adapter"),
    ("tools [on|off|check]", "let the model call tools; `/tools` lists, `check` asks servers", "tools"),
    ("file|attach PATH", "attach text, a document or a picture to the next question", "path"),
    ("new|clear", "begin a new conversation with the same options"),
    ("sessions|search|history [WORDS]", "list or search conversations, open one"),
    ("open NUMBER", "open a conversation by its number"),
    ("save|rename [TITLE]", "name this conversation (it is always stored)"),
    ("delete", "delete this conversation; `/undo` brings it back"),
    ("undo", "bring back the conversation deleted last"),
    ("export [PATH.md|PATH.json]", "write this conversation to a file", "path"),
    ("receipt [PATH.json]", "write the last answer's receipt, for `edgeinfer verify`", "path"),
    ("regen|regenerate|retry", "answer once more; the answers so far are kept"),
    ("next", "show the next alternative"),
    ("prev", "show the previous alternative"),
    ("continue", "continue an answer that was cut"),
    ("edit [TEXT]", "change your last question and ask again; the old branch is kept"),
    ("fork", "copy this branch into a new conversation"),
    ("copy [code [N]|all]", "copy the answer, a code block, or everything", "copy"),
    ("reasoning", "unfold or fold the model's reasoning"),
    ("drop", "stop sending the oldest turns"),
    ("summarise|summarize", "send a summary in place of the oldest turns"),
    ("stats", "tokens, speed, context and how this process started"),
    ("theme [NAME]", "colours", "theme"),
    ("editor", "write in your $EDITOR"),
    ("quit|exit|q|bye", "leave; everything is stored"),
)


def _slash(usage: str, summary: str, kind: Kind = "") -> SlashCommand:
    names, _, argument = usage.partition(" ")
    name, *aliases = names.split("|")
    return SlashCommand(name, argument, summary, kind, tuple(aliases))


COMMANDS = tuple(_slash(*row) for row in _ROWS)
BY_NAME: dict[str, SlashCommand] = {name: c for c in COMMANDS for name in (c.name, *c.aliases)}


def is_command(line: str) -> bool:
    """Return whether `line` is one line that begins with `/word`, but not `//` or a path (`/usr/bin`).

    Returns True for two joined commands (`/receipt/stats`), so that `parse` reports the mistake.
    """
    word = line[1:].split(None, 1)[0] if len(line) > 1 and not line[1].isspace() else ""
    is_path = "/" in word and not BY_NAME.keys() >= set(word.lower().split("/"))
    return line.startswith("/") and bool(word) and not is_path and "\n" not in line


def parse(line: str) -> TypedCommand:
    """Parse a command line. Raises UsageError for an unknown command or a wrong number of arguments."""
    word, _, argument = line[1:].strip().partition(" ")
    argument = argument.strip()
    command = BY_NAME.get(word.lower())
    if command is None:
        near = difflib.get_close_matches(word.lower(), BY_NAME, n=1, cutoff=0.5)
        step = f"did you mean /{near[0]}?" if near else "`/help` lists the commands"
        raise UsageError(f"there is no command /{word}", hint=step)
    if argument and not command.argument:
        raise UsageError(f"/{command.name} takes no argument", hint=f"type /{command.name}")
    if not argument and command.argument and not command.argument.startswith("["):
        problem = f"/{command.name} needs an argument: {command.argument}"
        raise UsageError(problem, hint=f"type {command.usage}")
    return TypedCommand(command.name, argument)


def help_text() -> str:
    """Return the help: a line for each command, with its argument and its summary."""
    width = max(len(c.usage) for c in COMMANDS)
    return "\n".join(f"{c.usage:<{width}}  {c.summary}" for c in COMMANDS)


_MENTION = re.compile(r'(?<!\S)@"?([^\s"]*)$')

#: Maximum number of completions that are offered.
LIMIT = 60


class CommandCompletion(msgspec.Struct, frozen=True):
    """A completion: `text` replaces the `length` characters before the cursor.

    The list of completions shows `label` and `summary`. `whole`: the typed text may be complete
    already, so Enter sends that text, and only Tab inserts the completion.
    """

    text: str
    length: int
    label: str
    summary: str = ""
    whole: bool = False


#: Kind of argument → function that returns its possible values, each with a description.
Names = Mapping[Kind, Callable[[], Sequence[tuple[str, str]]]]


def complete(before: str, names: Names, cwd: Path | None = None) -> list[CommandCompletion]:
    """Return the completions of `before`, the text before the cursor; [] if there is none.

    `names` has, for each kind of argument, a function that lists the values. Relative paths are
    resolved against `cwd` (None: the working folder).
    """
    if is_command(before) or before == "/":
        word, space, argument = before.partition(" ")
        return _argument(word, argument, names, cwd) if space else _name(word)
    mention = _MENTION.search(before)
    if mention is None:
        return []
    return [_path(p, len(mention[1])) for p in attachments.complete(mention[1], cwd, LIMIT)]


def _name(word: str) -> list[CommandCompletion]:
    """Complete a command: names that begin with `word`, then aliases, then names that contain it."""
    typed = word[1:].lower()
    first = [c for c in COMMANDS if c.name.startswith(typed)]
    second = [c for c in COMMANDS if any(a.startswith(typed) for a in c.aliases)]
    third = [c for c in COMMANDS if len(typed) > 1 and typed in c.name]
    matches = dict.fromkeys([*first, *second, *third])
    if word[1:] in BY_NAME and len(matches) == 1:
        return []
    return [
        CommandCompletion(
            text=f"/{c.name}" + (" " if c.argument else ""),
            length=len(word),
            label=c.usage,
            summary=c.summary,
            whole=not c.argument or (c.argument.startswith("[") and word[1:] == c.name),
        )
        for c in matches
    ]


def _argument(word: str, argument: str, names: Names, cwd: Path | None) -> list[CommandCompletion]:
    command = BY_NAME.get(word[1:])
    if command is None:
        return []
    if command.kind == "path":
        return [_path(p, len(argument)) for p in attachments.complete(argument, cwd, LIMIT)]
    list_names = names.get(command.kind) or _BUILT_IN.get(command.kind)
    rows = list_names() if list_names else ()
    return [
        CommandCompletion(name, len(argument), name, summary, whole=True)
        for name, summary in rows
        if name.lower().startswith(argument.lower()) and name != argument
    ][:LIMIT]


def _path(path: str, length: int) -> CommandCompletion:
    return CommandCompletion(path, length, path, "folder" if path.endswith("/") else "")


def _adapters() -> Sequence[tuple[str, str]]:
    try:
        files = sorted(os.listdir(paths.adapters_path()))
    except OSError:
        files = []
    names = [(file.removesuffix(".gguf"), "pulled") for file in files if file.endswith(".gguf")]
    return [*names, ("none", "no adapter")]


def theme_names() -> list[str]:
    """Return the names of the Textual app's themes."""
    from textual.theme import BUILTIN_THEMES  # imported here: the plain chat seldom needs it (0.3 s)

    return sorted(["edgeinfer-dark", "edgeinfer-light", *BUILTIN_THEMES])


_BUILT_IN: Names = {
    "setting": lambda: [(f"{option.label} ", option.help) for option in presets.OPTIONS.values()],
    "copy": lambda: [("code", "the last code block"), ("all", "the conversation as Markdown")],
    "adapter": _adapters,
    "theme": lambda: [(name, "") for name in theme_names()],
    "tools": lambda: [("on", "offer configured tools"), ("off", "none"), ("check", "ask the servers")],
}
