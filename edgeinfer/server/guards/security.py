"""Checks of Host, Origin, API key and user, before a request's body is read.

Web pages in the user's browser can reach a local endpoint. The Host check stops DNS rebinding, the
Origin check stops fetch(), and Sec-Fetch-Site stops `<img>` and navigation, which send no Origin. Only
origins given by `--allow-origin` get CORS headers.

Other users of this machine can also connect to loopback. If there are no API keys, the kernel says
which user opened a connection.
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
#: Routes without API key, for health probes. (/metrics needs a key.)
OPEN_ROUTES = frozenset({"/health"})
#: Matches a Host header: a name, with or without a final dot, or `[IPv6 address]`; then a port or none.
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[\w.-]+?)\.?(?::\d{0,5})?", re.ASCII | re.IGNORECASE)
_METHODS = "GET, POST, DELETE, OPTIONS"
#: Matches a valid value of Access-Control-Request-Headers: names of headers, separated by commas.
_ASKED = re.compile(r"[\w, -]{1,2048}", re.ASCII)

Headers = Mapping[str, str]


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """The access rules of an endpoint.

    - `hosts`: accepted names in the Host header, in lower case; `.example.org` accepts its subdomains.
    - `any_address`: accept any IP address as Host, for endpoints that listen beyond loopback. This is
      safe because they require a key, and DNS rebinding needs a name.
    - `origins`: accepted origins of web pages, e.g. `http://localhost:3000`.
    - `owner`: if there are no keys, programs of this user (uid) and of root are admitted, as
      administrators; None admits the programs of all users as administrators.
    - `any_user`: if there are no keys, programs of users other than `owner` are admitted, too, but may
      not change models and settings that all clients share (`Caller.is_admin`).
    """

    keys: Keys
    hosts: frozenset[str] = LOOPBACK_HOSTS
    origins: frozenset[str] = frozenset()
    any_address: bool = False
    owner: int | None = None
    any_user: bool = False

    def check_host(self, headers: Headers) -> None:
        """Raise Problem 400 if there is no Host header, and 403 if its name is not accepted."""
        host = headers.get("host", "")
        if not host:
            raise Problem(400, "The request has no Host header.", code="missing_host")
        name = host_name(host)
        is_known = name in self.hosts or any(h.startswith(".") and name.endswith(h) for h in self.hosts)
        if not (name and is_known) and not (self.any_address and _is_address(name)):
            foreign = host[:200]
            message = f"Host '{foreign}' is not a name of this endpoint; `--allow-host` adds it."
            raise Problem(403, message, code="host_not_allowed")

    def check_origin(self, headers: Headers, scheme: str) -> str | None:
        """Return the Origin header if it is one of `origins`, so that the response needs CORS headers.

        Return None for the endpoint's own pages (`scheme` is "http" or "https"), and for clients that
        are not browsers. Raises Problem 403 for other web pages.
        """
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
        """Return the name of the request's API key; "" if the endpoint has no keys.

        If the key is missing or wrong, the name is "" for a route in `OPEN_ROUTES`, which needs no key.
        Raises Problem 401 for other routes.
        """
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
        """Return the client of a request. `key` is the name that `check_key` has returned.

        Raises Problem 403 if there are no keys, and the connection's user is not admitted.
        """
        if self.keys:
            return Caller(key, key == self.keys.first, turn=key if len(self.keys) > 1 else "")
        if self._is_owners(connection):
            return OWN
        if self.any_user:
            name = f"uid-{connection.uid if connection else None}"
            return Caller(name, is_admin=False, turn=name)
        message = f"Without an API key this endpoint answers only the programs of user {self.owner}; "
        message += "start it with `EDGEINFER_API_KEY=KEY` or `any-user = true` in [serve]."
        raise Problem(403, message, code="user_not_allowed")

    def cache_salt(self, caller: Caller) -> str:
        """Return the salt that separates a caller's cached prefixes from other callers'.

        It is "" for the only API key, and without keys for the user who runs the endpoint.
        """
        return self.keys.cache_salt(caller.name) if self.keys else caller.name

    def _is_owners(self, connection: Connection | None) -> bool:
        if connection is None:
            return False
        return self.owner is None or connection.is_unix or connection.uid in (self.owner, 0)


def host_name(host: str) -> str:
    """Return the name in a Host header without its port, in lower case; "" if it is invalid.

    `Host:80` gives `host`, and `[::1]:80` gives `[::1]`.
    """
    match = _HOST.fullmatch(host)
    return match[1].lower() if match else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def cors_headers(origin: str, asked: str | None = None) -> dict[str, str]:
    """Return CORS headers for an allowed origin. They never allow credentials (cookies).

    For a preflight, `asked` is its Access-Control-Request-Headers ("" for none).
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
