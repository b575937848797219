"""Report how much of the latest prompt was cached, and its first divergent token."""

from __future__ import annotations

import msgspec

from edgeinfer.runtime.events import Divergence, Finished, Usage


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """A finished prompt: its cached tokens, and where it diverged from the prefix cache."""

    model: str
    usage: Usage
    divergence: Divergence

    @classmethod
    def of(cls, model: str, end: Finished) -> CacheReport:
        """Report on the prompt of a finished generation."""
        return cls(model=model, usage=end.usage, divergence=end.divergence)

    @property
    def summary(self) -> str:
        """Say in one line how many tokens were cached, and why no more."""
        usage, where = self.usage, self.divergence
        disk = f", {usage.cached_disk_tokens:,} from disk" if usage.cached_disk_tokens else ""
        cached = f"prompt cache: {usage.cached_tokens:,} of {usage.prompt_tokens:,} tokens{disk}"
        match where.cause:
            case "text":
                return (
                    f"{cached}; matches the cache for {where.n_tokens:,} tokens, then differs: after "
                    f"{_quoted(where.before)} {_quoted(where.here)} instead of {_quoted(where.there)}"
                )
            case "end":
                return f"{cached}; new from token {where.n_tokens + 1:,} on"
            case "nothing":
                return f"{cached}; no cached prefix"
            case "off":
                return f"{cached}; sharing off for that request"
        return cached


def _quoted(text: str) -> str:
    printable = "".join(c if c.isprintable() else " " for c in text)  # a terminal may show it
    return f"“{' '.join(printable.split())}”"
