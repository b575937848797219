"""What was remembered of the latest prompt, told in words."""

from __future__ import annotations

import msgspec

from edgeinfer.runtime.events import Divergence, Finished, Usage


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
