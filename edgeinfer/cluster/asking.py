"""What crosses from the application's front to a replica, and back."""

from __future__ import annotations

from typing import NamedTuple

#: What belongs to one connection (RFC 9110, 7.6.1), and what the next one is told anew.
_OF_A_CONNECTION = frozenset(
    ("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade")
)
_ANEW = frozenset(("host", "content-length"))

Headers = tuple[tuple[str, str], ...]


class Asked(NamedTuple):
    """A client's request. `beginnings` are the names of what it begins with (`beginnings.names`)."""

    method: str
    target: str
    headers: Headers
    body: bytes
    beginnings: tuple[int, ...] = ()


class Accepted(NamedTuple):
    """A replica (Ray's id) has the request; its answer follows, however long that takes."""

    replica: str


class Head(NamedTuple):
    """Status and headers."""

    status: int
    headers: Headers


#: An answer is `Accepted`, a `Head`, then the bytes of the body as they come.
Part = Accepted | Head | bytes


def passed_on(headers: Headers) -> Headers:
    """The headers that a proxy passes on, names in small letters."""
    small = ((name.lower(), value) for name, value in headers)
    return tuple((name, value) for name, value in small if name not in _OF_A_CONNECTION | _ANEW)
