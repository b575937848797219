"""The user's own editor, on the terminal, while the app stands aside."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from textual.app import App, SuspendNotSupported

from edgeinfer.errors import UsageError


def edit(app: App[Any], text: str) -> str:
    """Return what the user made of `text` in $VISUAL, $EDITOR or vi.

    Raises UsageError when the editor cannot be run or fails, or the app cannot leave the terminal.
    """
    command = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi")
    fd, name = tempfile.mkstemp(prefix="edgeinfer-", suffix=".md")
    path = Path(name)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as out:
            out.write(text)
        with app.suspend():
            ended = subprocess.run([*command, name], stdin=0, stdout=0, check=False).returncode
        if ended:
            raise UsageError(
                f"{command[0]} ended with {ended}; the text is as it was",
                hint="set EDITOR to an editor",
            )
        return path.read_text("utf-8").rstrip("\n")
    except SuspendNotSupported as error:
        raise UsageError("the app cannot leave this terminal", hint="type here") from error
    except FileNotFoundError as error:
        raise UsageError(f"there is no editor {command[0]}", hint="set EDITOR to an editor") from error
    finally:
        path.unlink(missing_ok=True)
