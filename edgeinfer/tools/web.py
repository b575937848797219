"""A built-in tool that fetches web pages as text, only from hosts that the user has listed.

A host name is resolved once: its addresses are checked, and the connection goes to one of them. Each
redirect is checked like the first URL.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from edgeinfer.config.config_file import refuse_offline
from edgeinfer.media import document_files
from edgeinfer.tools.builtin import TEXT, Builtin, RefusedError, tool_info
from edgeinfer.tools.tool_use import Stop, StoppedError

if TYPE_CHECKING:
    import httpx2

_MAX_BYTES = 2 << 20
_MAX_REDIRECTS = 5
_TIMEOUT_S, _CONNECT_S = 30.0, 10.0
_TEXTS = re.compile(r"text/|application/(.*[+/])?(json|xml|javascript|yaml|pdf)")
#: IPv6 networks that do not count as public: gateways forward their packets to IPv4 addresses that are
#: parts of the IPv6 addresses, and may be private.
_TRANSLATED = [ipaddress.ip_network(text) for text in ("64:ff9b::/32", "2002::/16", "2001::/32")]
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Web(Builtin):
    """The tool `fetch`. `hosts` lists from where it may fetch: names of hosts, and private networks.

    In a name, `*` matches any text. Example: `["*.example.com", "10.0.0.0/8"]`.
    """

    server = "web"

    def __init__(self, hosts: Sequence[str], enabled: Sequence[str]) -> None:
        self._names = [host.lower() for host in hosts]
        self._networks = [network for host in hosts if (network := _network(host))]
        description = f"Fetch a web page as text. Hosts: {', '.join(hosts)}"
        super().__init__([tool_info("fetch", description, {"url": TEXT})], enabled)

    def unavailable(self) -> str:
        return "" if self._names else "no host is listed: set tools.fetch-hosts in config.toml"

    def _fetch(self, stop: Stop, url: str) -> str:
        import httpx2  # slow import (75 to 120 ms)

        from edgeinfer.models.fetching.http_client import refuse_downgrade

        end_s = time.monotonic() + _TIMEOUT_S
        try:
            address = httpx2.URL(url)
            for _ in range(_MAX_REDIRECTS + 1):
                with self._answer(address, stop, end_s) as response:
                    if response.has_redirect_location:
                        target = address.join(response.headers["Location"])
                        refuse_downgrade(address.host, address, target)
                        address = target
                        continue
                    return _text(response, stop, end_s)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            _refuse_end(stop, end_s)
            raise RefusedError(f"{url}: {str(error) or type(error).__name__}") from error
        raise RefusedError(f"{url}: more than {_MAX_REDIRECTS} redirects")

    @contextmanager
    def _answer(self, url: httpx2.URL, stop: Stop, end_s: float) -> Iterator[httpx2.Response]:
        """Request a URL at a checked address of its host. Raises RefusedError, StoppedError."""
        import httpx2

        from edgeinfer.models.fetching.http_client import range_headers, shut_down

        address = self._address(url)
        _refuse_end(stop, end_s)
        left_s = max(end_s - time.monotonic(), 0.01)
        limits = httpx2.Timeout(left_s, connect=min(left_s, _CONNECT_S))

        def trace(name: str, info: dict[str, Any]) -> None:
            if name in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
                stop.add(lambda: shut_down(info["return_value"]))

        headers = {"Host": url.netloc.decode("ascii"), **range_headers(0, "")}
        with (
            httpx2.Client(trust_env=False, timeout=limits, follow_redirects=False) as client,
            client.stream(
                "GET",
                url.copy_with(host=str(address)),
                headers=headers,
                extensions={"sni_hostname": url.raw_host.decode("ascii"), "trace": trace},
            ) as response,
        ):
            yield response

    def _address(self, url: httpx2.URL) -> _Address:
        host = url.host.lower()
        literal = _network(host)
        listed = any(fnmatchcase(host, name) for name in self._names)
        if not listed and not (literal and any(literal[0] in network for network in self._networks)):
            raise RefusedError(f"{host} is not listed in tools.fetch-hosts: {', '.join(self._names)}")
        if url.scheme not in ("http", "https") or url.userinfo:
            raise RefusedError("use an http or https URL without user name and password")
        refuse_offline(host)
        rows = socket.getaddrinfo(host, url.port or 0, type=socket.SOCK_STREAM)
        addresses = [ipaddress.ip_address(str(row[4][0]).partition("%")[0]) for row in rows]
        for address in addresses:
            if not _is_public(address) and not any(address in network for network in self._networks):
                raise RefusedError(f"{host}: the private address {address} is not in tools.fetch-hosts")
        return addresses[0]


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text.strip("[]"), strict=False)
    except ValueError:
        return None


def _is_public(address: _Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return _is_public(address.ipv4_mapped)
        if any(address in network for network in _TRANSLATED):
            return False
    return address.is_global and not address.is_multicast


def _refuse_end(stop: Stop, end_s: float) -> None:
    if stop.is_set:
        raise StoppedError
    if time.monotonic() > end_s:
        raise RefusedError(f"the page took more than {_TIMEOUT_S:g} s")


def _text(response: httpx2.Response, stop: Stop, end_s: float) -> str:
    """Read a response as text. Raises RefusedError (an error, not text, too large), StoppedError."""
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if response.status_code != 200:
        raise RefusedError(f"the server answers {response.status_code}")
    if not _TEXTS.match(kind):
        raise RefusedError(f"the server sends {kind or 'an unknown type'}, but only text is read")
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise RefusedError("the server compressed the page, which was not requested")
    data = bytearray()
    for piece in response.iter_bytes():
        data += piece
        if len(data) > _MAX_BYTES:
            raise RefusedError(f"the page has more than {_MAX_BYTES >> 20} MiB")
        _refuse_end(stop, end_s)
    _refuse_end(stop, end_s)  # after a stop, reading ends without an error
    page = bytes(data)
    if document_files.is_document(page):
        return document_files.text_of(page, response.url.path)
    try:
        return page.decode(response.charset_encoding or "utf-8", "replace")
    except LookupError:
        return page.decode("utf-8", "replace")
