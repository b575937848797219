"""`auto-warm.log` in the state directory: what was done in the background, or why nothing was."""

from __future__ import annotations

import time

from edgeinfer.platform import paths

LOG = "auto-warm.log"
_LOG_BYTES = 256 << 10


def has(words: str) -> bool:
    """Whether the log has these words since it was last started over."""
    path = paths.state_dir() / LOG
    return path.exists() and words in path.read_text("utf-8", "replace")


def add(words: str) -> None:
    """Add a line to the log; an old one is started over when it has grown. Raises OSError."""
    path = paths.private_dir(paths.state_dir()) / LOG
    if path.exists() and path.stat().st_size > _LOG_BYTES:
        path.replace(path.with_suffix(".old.log"))
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{stamp} {words}\n")
