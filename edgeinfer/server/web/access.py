"""Sign-in to the chat page: a one-time code or the first API key is exchanged for an HttpOnly cookie.

`edgeinfer web` makes the code. Codes and cookies are signed (HMAC) with a secret in the data folder
(mode 0600). Therefore a code can be made without the endpoint, and cookies stay valid if the endpoint
restarts. A code is valid once, for two minutes, and only at an endpoint that ran when it was made.

For connections on this machine, the kernel says which user opened them. Only the endpoint's own user
can use a code, and only the user who got a cookie can use it. The endpoint's own user needs neither
code nor key if there are no API keys, or within two minutes after `edgeinfer web`.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import time
from functools import cached_property
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING

from edgeinfer.errors import ServeError
from edgeinfer.platform import paths
from edgeinfer.platform.disk import new_file, path_errors
from edgeinfer.server.guards.keys import Keys
from edgeinfer.server.problems import Problem

if TYPE_CHECKING:
    from edgeinfer.server.connection import Connection
    from edgeinfer.server.endpoint import Endpoint
    from edgeinfer.server.model_pool import ModelAdministrator
    from edgeinfer.server.web.conversations import Conversations
    from edgeinfer.server.web.models import Pulls

_CODE_S = 120
_COOKIE_S = 30 * 24 * 3600
#: Path under which all requests of the page lie, so that browsers send the cookie to no other route.
PATH = "/web"


def read_secret() -> bytes:
    """Return the secret (32 bytes) that signs sign-in codes and cookies; the first call makes it.

    Raises ServeError if other users can read the secret's file, or if the file is too short.
    """
    path = paths.data_dir() / "web-secret"
    with path_errors(path, "check the data folder", ServeError):
        paths.make_folder(path.parent)
        if not path.exists():  # `new_file` is atomic: two processes that get here read the same secret
            with new_file(path, 0o600, replaces=False) as file:
                file.write(secrets.token_bytes(32))
        status = path.stat()
        secret = path.read_bytes()
    if status.st_mode & 0o077:
        raise ServeError(
            f"other users can read {path}, with which they could sign in to the chat page",
            hint=f"remove {path} and restart the endpoint; then sign in again with `edgeinfer web`",
        )
    if len(secret) < 32:
        raise ServeError(
            f"{path}, the secret of the chat page, is damaged: it has {len(secret)} bytes, not 32",
            hint=f"remove {path} and restart the endpoint; then sign in again with `edgeinfer web`",
        )
    return secret


def _sign(secret: bytes, *parts: str) -> str:
    return hmac.digest(secret, "\0".join(parts).encode(), hashlib.sha256).hex()


def _is_same(signature: str, expected: str) -> bool:
    return hmac.compare_digest(signature.encode("utf-8", "replace"), expected.encode())


def make_code() -> str:
    """Make a one-time sign-in code, to be put into the page's URL. Raises what `read_secret` raises."""
    made_at, nonce = f"{time.time():.6f}", secrets.token_hex(8)
    return f"{made_at}-{nonce}-{_sign(read_secret(), 'code', made_at, nonce)}"


def user_of(connection: Connection | None) -> str:
    """Return the client's uid as text; "" if it is on another machine or unknown."""
    uid = None if connection is None else connection.uid
    return "" if uid is None else str(uid)


class Access:
    """Checks sign-in codes and cookies for the page of the endpoint at `port`.

    In the methods, `user` is the client's uid as text, as `user_of` returns it.
    """

    def __init__(self, port: int, keys: Keys) -> None:
        self._keys = keys
        self._port = port
        self._began = time.monotonic()
        self._announced_until = 0.0
        self._used: set[str] = set()

    @cached_property
    def _secret(self) -> bytes:
        return read_secret()

    def accepts_key(self, key: str) -> bool:
        """Return whether `key` is the first (the administrator's) API key."""
        return self._keys.name(key) == self._keys.first

    def redeem(self, code: str, user: str) -> bool:
        """Return whether a code is valid for `user`, and mark it as used."""
        made_at, nonce, signature, *_ = [*code.split("-", 2), "", ""]
        if not _is_same(signature, _sign(self._secret, "code", made_at, nonce)):
            return False
        age_s = time.time() - float(made_at)
        # accept only codes that were made after the endpoint's start, even if the clock was set back
        # since then
        is_fresh = -1 < age_s < min(_CODE_S, time.monotonic() - self._began)
        if code in self._used or not is_fresh or user not in ("", "0", str(os.getuid())):
            return False
        self._used.add(code)
        return True

    def announce(self) -> None:
        """Let the endpoint's own user sign in once without code and key within the next two minutes."""
        self._announced_until = time.monotonic() + _CODE_S

    def may_sign_in(self, user: str) -> bool:
        """Return whether `user` may sign in without code and key.

        Only the user who runs the endpoint may, and if there are API keys, only once, within two
        minutes after `announce`.
        """
        is_announced = time.monotonic() < self._announced_until
        if user != str(os.getuid()) or (self._keys and not is_announced):
            return False
        self._announced_until = 0.0
        return True

    def _signature(self, until: str, user: str) -> str:
        return _sign(self._secret, "cookie", until, self._keys.first, str(self._port), user)

    def cookie(self, user: str, *, secure: bool) -> str:
        """Return a Set-Cookie header. The cookie becomes invalid if the first API key changes."""
        until = str(int(time.time()) + _COOKIE_S)
        value = f"edgeinfer-{self._port}={until}-{self._signature(until, user)}"
        secure_flag = "; Secure" if secure else ""
        return f"{value}; Path={PATH}; Max-Age={_COOKIE_S}; HttpOnly; SameSite=Strict{secure_flag}"

    def check(self, cookies: str, user: str) -> str:
        """Check the sign-in cookie in the header Cookie, which is `cookies`.

        Return the first API key's name ("" without keys): the page's requests count as requests with
        this key. Raises Problem 401 if the cookie is missing, expired or invalid.
        """
        value = ""
        with contextlib.suppress(CookieError, KeyError):
            value = SimpleCookie(cookies)[f"edgeinfer-{self._port}"].value
        until, _, signature = value.partition("-")
        if not _is_same(signature, self._signature(until, user)) or int(until) < time.time():
            raise Problem(401, "Sign in first: `edgeinfer web` opens the page.", code="not_signed_in")
        return self._keys.first


class Web:
    """The chat page of an endpoint. Its parts are imported and created when a request needs them."""

    def __init__(self, access: Access, endpoint: Endpoint, admin: ModelAdministrator) -> None:
        self.access = access
        self._endpoint = endpoint
        self._admin = admin

    @cached_property
    def conversations(self) -> Conversations:
        from edgeinfer.server.web.conversations import Conversations

        return Conversations(self._endpoint)

    @cached_property
    def pulls(self) -> Pulls:
        from edgeinfer.server.web.models import Pulls

        return Pulls(self._admin, self._endpoint)
