"""The `/` commands: one table for parsing, completion, help and documentation. It runs none of them."""

from __future__ import annotations

import difflib
from typing import Literal

import msgspec

from edgeinfer.errors import UsageError

#: What an argument is, so that it can be completed.
Kind = Literal[
    "none",
    "text",
    "number",
    "model",
    "path",
    "prompt",
    "preset",
    "adapter",
    "theme",
    "setting",
    "copy",
    "command",
]


class Slash(msgspec.Struct, frozen=True):
    """One command. `argument` is shown in help; "" takes none, [brackets] make it optional."""

    name: str
    argument: str
    summary: str
    kind: Kind = "none"
    aliases: tuple[str, ...] = ()


class Typed(msgspec.Struct, frozen=True):
    """A line that was a command."""

    name: str
    argument: str = ""


COMMANDS: tuple[Slash, ...] = (
    Slash("help", "[COMMAND]", "commands and keys", "command", ("?",)),
    Slash("model", "[NAME]", "switch to another model, or pick one", "model", ("models",)),
    Slash(
        "system",
        "[TEXT|NAME]",
        "show or set the system prompt; a saved one by its name; `none` for none",
        "prompt",
    ),
    Slash("save-system", "NAME", "save the system prompt under a name", "text"),
    Slash(
        "temp",
        "[NUMBER]",
        "temperature: 0 always picks the likeliest token",
        "number",
        ("temperature",),
    ),
    Slash(
        "set", "[OPTION VALUE]", "a sampling option, e.g. `/set top-p 0.9`; alone shows all", "setting"
    ),
    Slash("preset", "[NAME]", "several sampling options at once", "preset"),
    Slash("ctx", "[TOKENS]", "context length; the model is loaded again", "number"),
    Slash(
        "lora",
        "[NAME[:SCALE] …]",
        "apply these LoRA adapters and no others; `none` for none",
        "adapter",
        ("adapters",),
    ),
    Slash("file", "PATH", "attach a text file to the next question", "path", ("attach",)),
    Slash("new", "", "begin a new conversation", aliases=("clear",)),
    Slash(
        "sessions", "[WORDS]", "list or search conversations, open one", "text", ("search", "history")
    ),
    Slash("open", "NUMBER", "open a conversation by its number", "number"),
    Slash("save", "[TITLE]", "name this conversation (it is always stored)", "text", ("rename",)),
    Slash("delete", "", "delete this conversation; `/undo` brings it back"),
    Slash("undo", "", "bring back what was deleted last"),
    Slash("export", "[PATH.md|PATH.json]", "write this conversation to a file", "path"),
    Slash(
        "regen", "", "answer once more; the answers so far are kept", aliases=("regenerate", "retry")
    ),
    Slash("next", "", "show the next alternative"),
    Slash("prev", "", "show the previous alternative"),
    Slash("continue", "", "continue an answer that was cut"),
    Slash("edit", "[TEXT]", "change your last question and ask again; the old branch is kept", "text"),
    Slash("fork", "", "copy this branch into a new conversation"),
    Slash("copy", "[code [N]|all]", "copy the answer, a code block, or everything", "copy"),
    Slash("reasoning", "", "unfold or fold the model's reasoning"),
    Slash("drop", "", "stop sending the oldest turns"),
    Slash("summarise", "", "send a summary in place of the oldest turns", aliases=("summarize",)),
    Slash("stats", "", "tokens, speed, context and how this process started"),
    Slash("theme", "[NAME]", "colours", "theme"),
    Slash("settings", "", "every setting and key"),
    Slash("editor", "", "write in your $EDITOR"),
    Slash("quit", "", "leave; everything is stored", aliases=("exit", "q", "bye")),
)

BY_NAME: dict[str, Slash] = {name: c for c in COMMANDS for name in (c.name, *c.aliases)}


def is_command(line: str) -> bool:
    """Whether a line is a command: `/word` on one line. `//` and paths (`/usr/bin`) are text."""
    word = line[1:].split(None, 1)[0] if len(line) > 1 and not line[1].isspace() else ""
    return line.startswith("/") and bool(word) and "/" not in word and "\n" not in line


def parse(line: str) -> Typed:
    """Parse a command line. Raises UsageError with the nearest command, or the argument at fault."""
    word, _, argument = line[1:].strip().partition(" ")
    argument = argument.strip()
    command = BY_NAME.get(word.lower())
    if command is None:
        near = difflib.get_close_matches(word.lower(), BY_NAME, n=1, cutoff=0.5)
        raise UsageError(
            f"there is no command /{word}",
            hint=f"did you mean /{near[0]}?" if near else "/help lists them",
        )
    if argument and not command.argument:
        raise UsageError(f"/{command.name} takes nothing after it", hint=f"type /{command.name}")
    if not argument and command.argument and not command.argument.startswith("["):
        raise UsageError(
            f"/{command.name} needs {command.argument}", hint=f"/{command.name} {command.argument}"
        )
    return Typed(command.name, argument)


def complete_name(line: str) -> list[Slash]:
    """Return what a begun line may become: matches of a name first, then of an alias, then inside."""
    word = line[1:].lower()
    first = [c for c in COMMANDS if c.name.startswith(word)]
    second = [c for c in COMMANDS if any(a.startswith(word) for a in c.aliases)]
    third = [c for c in COMMANDS if len(word) > 1 and word in c.name]
    return list(dict.fromkeys([*first, *second, *third]))


def help_text() -> str:
    """Every command with its argument and summary, one a line, aligned."""
    usage = [f"/{c.name} {c.argument}".rstrip() for c in COMMANDS]
    width = max(map(len, usage))
    return "\n".join(f"{u.ljust(width)}  {c.summary}" for u, c in zip(usage, COMMANDS, strict=True))
