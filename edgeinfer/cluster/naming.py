"""What of a request's body the way to a replica depends on: its model, and what it begins with."""

from __future__ import annotations

import msgspec

from edgeinfer import beginnings

#: What a model reads, in the order in which templates write it; in every dialect.
_FIELDS = ("tools", "system", "instructions", "messages", "input", "prompt")


def decoded(body: bytes) -> object:
    """The body as JSON, None where it is none: what is wrong with it is the endpoint's to say."""
    try:
        return msgspec.json.decode(body) if body else None
    except msgspec.DecodeError:
        return None


def names(body: object) -> tuple[int, ...]:
    """The names of a request's beginnings (`beginnings.names`). `body` is the decoded JSON."""
    if not isinstance(body, dict):
        return ()
    return beginnings.names([body[field] for field in _FIELDS if field in body])


def model_named(body: object) -> str:
    """The model that a request names, "" for none."""
    named = body.get("model") if isinstance(body, dict) else None
    return named if isinstance(named, str) else ""
