"""What was remembered of the latest prompt, told in words, and left where `edgeinfer ps` finds it.

It is left in memory of the process that was asked, which `/proc` shows to its user alone: it holds
words of a prompt, and is gone with the process.
"""

from __future__ import annotations

import os

import msgspec

from edgeinfer.runtime.events import Divergence, Finished, Usage

_NAME = "edgeinfer-last-prompt"


class LastPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that was answered: how much was remembered, and where it went a way of its own."""

    model: str
    usage: Usage
    divergence: Divergence

    @classmethod
    def of(cls, model: str, end: Finished) -> LastPrompt:
        """The prompt of a generation that has ended."""
        return cls(model=model, usage=end.usage, divergence=end.divergence)

    @property
    def words(self) -> str:
        """How much was remembered, and why no more."""
        usage, where = self.usage, self.divergence
        disk = f" ({usage.cached_disk_tokens:,} from the disk)" if usage.cached_disk_tokens else ""
        said = f"{usage.cached_tokens:,} of {usage.prompt_tokens:,} tokens remembered{disk}"
        match where.cause:
            case "text":
                return (
                    f"{said}; behind token {where.n_tokens:,}, after {_quoted(where.before)}, it says "
                    f"{_quoted(where.here)}, not {_quoted(where.there)}"
                )
            case "end":
                return f"{said}; from token {where.n_tokens + 1:,} on it was new"
            case "nothing":
                return f"{said}; nothing that is remembered begins like it"
            case "off":
                return f"{said}; it asked to share nothing"
        return said


def _quoted(text: str) -> str:
    seen = "".join(c if c.isprintable() else " " for c in text)  # a terminal may show it
    return f"“{' '.join(seen.split())}”"


class Shared:
    """Where a process leaves its latest one."""

    def __init__(self) -> None:
        self._fd = -1

    def write(self, last: LastPrompt) -> None:
        """Leave this one; Linux alone has a place for it."""
        if self._fd < 0 and hasattr(os, "memfd_create"):
            self._fd = os.memfd_create(_NAME)
        if self._fd >= 0:
            raw = msgspec.json.encode(last)
            os.ftruncate(self._fd, len(raw))
            os.pwrite(self._fd, raw, 0)


def left_by(pid: int) -> LastPrompt | None:
    """What the process `pid` has left; None where it was asked nothing yet, or is somebody else's."""
    folder = f"/proc/{pid}/fd"
    try:
        for number in os.listdir(folder):
            if os.readlink(f"{folder}/{number}").startswith(f"/memfd:{_NAME}"):
                with open(f"{folder}/{number}", "rb") as file:
                    return msgspec.json.decode(file.read(), type=LastPrompt)
    except (OSError, msgspec.MsgspecError):
        pass
    return None
