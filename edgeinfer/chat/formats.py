"""Export a conversation as Markdown or JSON; find the code blocks of an answer."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from edgeinfer.chat.history.values import Conversation, Turn
from edgeinfer.chat.markdown import parser
from edgeinfer.errors import StoreError


class Code(msgspec.Struct, frozen=True):
    language: str
    text: str


def code_blocks(markdown: str) -> list[Code]:
    """Return the code blocks of a Markdown text in order, also those inside lists and quotes."""
    return [
        Code(token.info.strip().split(" ")[0], token.content.rstrip("\n"))
        for token in parser().parse(markdown)
        if token.type in ("fence", "code_block")
    ]


def fence(text: str, info: str = "") -> str:
    """Return `text` in a code fence that is longer than any fence in it. `info` is the language."""
    fence = "`" * max(3, 1 + max((len(m) for m in re.findall(r"`{3,}", text)), default=0))
    return f"{fence}{info}\n{text.rstrip()}\n{fence}"


#: Format and version of the JSON export. The version changes if a key is removed or renamed.
SCHEMA = "edgeinfer-conversation/1"


def to_markdown(conversation: Conversation, turns: Sequence[Turn]) -> str:
    """Return the turns of a branch as Markdown, with reasoning in folded `<details>` elements."""
    parts = [
        f"# {conversation.title or 'Conversation'}",
        f"*{conversation.model}, {datetime.date.fromtimestamp(conversation.created_ms / 1000)}*",
    ]
    if conversation.system_prompt:
        parts += ["## System", conversation.system_prompt]
    for turn in turns:
        parts.append("## You" if turn.role == "user" else f"## {turn.model or 'Model'}")
        if turn.reasoning:
            head = "<details><summary>Reasoning</summary>"
            parts += [head, turn.reasoning.strip(), "</details>"]
        parts.append(turn.content.strip())
        for use in turn.calls:
            parts += [fence(use.arguments, f"json {use.name}"), fence(use.result, use.status)]
        parts += [
            f"*(picture: {a.name})*" if a.is_picture else fence(a.text, _info(a.name))
            for a in turn.attachments
        ]
        if turn.role == "assistant" and turn.status != "complete":
            parts.append(f"*({turn.error or turn.status})*")
    return "\n\n".join(p for p in parts if p) + "\n"


def to_json(conversation: Conversation, turns: Sequence[Turn]) -> str:
    """Return a conversation and its turns as JSON; `parent_id` is the id of the turn before."""
    values = {"conversation": conversation, "turns": turns}
    body = {"schema": SCHEMA, **msgspec.to_builtins(values)}
    return msgspec.json.format(msgspec.json.encode(body), indent=2).decode() + "\n"


def write(path: Path, text: str) -> Path:
    """Write `text` to a new file (mode 0600); return its path. Raises StoreError if `path` exists."""
    target = path.expanduser()
    try:
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError as error:
        raise StoreError(f"{target} already exists", hint="give another file name") from error
    except OSError as error:
        problem = f"{target} cannot be written: {error.strerror}"
        raise StoreError(problem, hint="name a file in a folder that you can write to") from error
    return target


def file_name(conversation: Conversation, suffix: str) -> str:
    """Return a file name made of the conversation's title: `name-three-colours.md`."""
    slug = re.sub(r"\W+", "-", conversation.title.lower()).strip("-")[:48].rstrip("-")
    return f"{slug or 'conversation'}{suffix}"


def _info(name: str) -> str:
    """Return the suffix of a file name (`py`), which names the language of a fence; "" if none."""
    return name.rpartition(".")[2] if "." in name else ""
