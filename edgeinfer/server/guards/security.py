"""Access checks on every route, before the body is read: Host, Origin, API key and user.

A web page can reach a local endpoint: by name (DNS rebinding; the Host check stops it), by fetch (the
Origin check), and by a plain `<img>` or navigation without Origin (the Sec-Fetch-Site check). CORS
headers are sent to named origins only.

Other users of this machine can also connect to loopback. Without API keys the kernel is asked which
user a connection belongs to.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping

import msgspec

from edgeinfer.server.callers import OWN, Caller
from edgeinfer.server.connection import Connection
from edgeinfer.server.guards.keys import Keys
from edgeinfer.server.problems import Problem

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
#: Routes that a probe may request without a key. /metrics needs a key.
OPEN_ROUTES = frozenset({"/health"})
#: Matches a Host header: a name (perhaps with a final dot) or an address in brackets, and a port.
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[\w.-]+?)\.?(?::\d{0,5})?", re.ASCII | re.IGNORECASE)
_METHODS = "GET, POST, DELETE, OPTIONS"
#: Matches a list of header names that a page of an allowed origin asks to send.
_ASKED = re.compile(r"[\w, -]{1,2048}", re.ASCII)

Headers = Mapping[str, str]


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """The access rules. `hosts` are lower-case names without a port, or suffixes that begin with a dot;
    `origins` are spelled as browsers spell them.

    `any_address` accepts every IP address as Host. It is for binds beyond loopback: they require a key,
    and DNS rebinding needs a name.

    Without keys only programs of the user `owner` and of root are answered. `any_user` admits all users
    without administrator rights. `owner` None disables the check of users.
    """

    keys: Keys
    hosts: frozenset[str] = LOOPBACK_HOSTS
    origins: frozenset[str] = frozenset()
    any_address: bool = False
    owner: int | None = None
    any_user: bool = False

    def check_host(self, headers: Headers) -> None:
        """Check the Host header. Raises Problem 400 without one, 403 for a foreign one."""
        host = headers.get("host", "")
        if not host:
            raise Problem(400, "The request has no Host header.", code="missing_host")
        name = host_name(host)
        is_known = name in self.hosts or any(h.startswith(".") and name.endswith(h) for h in self.hosts)
        if not is_known and not (self.any_address and _is_address(name)):
            foreign = host[:200]
            message = f"Host '{foreign}' is not a name of this endpoint; `--allow-host` adds it."
            raise Problem(403, message, code="host_not_allowed")

    def check_origin(self, headers: Headers, scheme: str) -> str | None:
        """Return the allowed origin of a cross-origin request, or None. Raises Problem 403."""
        origin = headers.get("origin")
        if origin is None:
            if headers.get("sec-fetch-site") in ("cross-site", "same-site"):
                message = "Requests from other web pages are refused."
                raise Problem(403, message, code="origin_not_allowed")
            return None
        if origin in self.origins:
            return origin
        if origin == f"{scheme}://{headers.get('host', '')}":
            return None
        message = f"Origin '{origin[:200]}' is not allowed; `edgeinfer serve --allow-origin` adds it."
        raise Problem(403, message, code="origin_not_allowed")

    def check_key(self, headers: Headers, route: str) -> str:
        """Return the name of the request's key, "" if none is needed. Raises Problem 401."""
        if not self.keys:
            return ""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        offered = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        name = self.keys.name(offered) if offered else None
        if name is None:
            if route in OPEN_ROUTES:
                return ""
            message = "An API key is required: send `Authorization: Bearer KEY`."
            message = "Incorrect API key provided." if offered else message
            raise Problem(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return name

    def caller(self, key: str, connection: Connection | None) -> Caller:
        """Return the client of a request. Without keys, raises Problem 403 for another user."""
        if self.keys:
            return Caller(key, self.keys.is_first(key), turn=key if len(self.keys) > 1 else "")
        if self._is_owners(connection):
            return OWN
        if self.any_user:
            name = f"uid-{connection.uid if connection else None}"
            return Caller(name, is_admin=False, turn=name)
        message = f"Without an API key this endpoint answers only the programs of user {self.owner}; "
        message += "start it with `EDGEINFER_API_KEY=KEY` or `any-user = true` in [serve]."
        raise Problem(403, message, code="user_not_allowed")

    def cache_salt(self, caller: Caller) -> str:
        """Return a salt that separates this caller's cached prefixes from others; "" for none."""
        return self.keys.cache_salt(caller.name) if self.keys else caller.name

    def _is_owners(self, connection: Connection | None) -> bool:
        if connection is None:
            return False
        return self.owner is None or connection.is_unix or connection.uid in (self.owner, 0)


def host_name(host: str) -> str:
    """Return the name in a Host header: `Host:80` → `host`, `[::1]:80` → `[::1]`; "" if invalid."""
    match = _HOST.fullmatch(host)
    return match[1].lower() if match else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def cors_headers(origin: str, asked: str | None = None) -> dict[str, str]:
    """Return CORS headers for an allowed origin; credentials are never allowed.

    `asked` are the request headers that a preflight lists ("" for none); official clients add some.
    """
    headers = {
        "access-control-allow-origin": origin,
        "vary": "Origin",
        "access-control-expose-headers": "x-request-id, retry-after, x-edgeinfer-ignored",
    }
    if asked is not None:
        headers |= {
            "access-control-allow-methods": _METHODS,
            "access-control-allow-headers": asked if _ASKED.fullmatch(asked) else "content-type",
            "access-control-max-age": "600",
        }
    return headers
