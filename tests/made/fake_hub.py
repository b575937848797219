"""A web server with faults on order, which also speaks Hugging Face's protocol."""

import hashlib
import json
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Fault:
    """The faults of one response. `cut_after`: bytes of the body before the connection is dropped."""

    status: int = 0
    cut_after: int | None = None
    ignore_range: bool = False
    wrong_byte_at: int | None = None
    extra_length: int = 0
    no_length: bool = False
    silent: bool = False
    wrong_start: int | None = None
    ignore_if_range: bool = False
    partial_without_etag: bool = False
    pace: int = 0
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Seen:
    """A request that the server received."""

    method: str
    path: str
    headers: dict[str, str]
    host: str


class _QuietServer(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore connections that are reset: tests kill their clients."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class FaultServer:
    """Serves files by path, with faults in the order of GET requests; records the requests.

    `served` counts body bytes.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.etags: dict[str, str] = {}
        self.faults: deque[Fault | None] = deque()
        self.always = Fault()
        self.seen: list[Seen] = []
        self.served = 0
        self.generation = 0
        self.grew = threading.Condition()
        self.release = threading.Event()
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.tokens: set[str] = set()
        self.lies: dict[str, str] = {}
        self.httpd = _QuietServer(("127.0.0.1", 0), type("Handler", (HubHandler,), {"hub": self}))
        self.httpd.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.httpd.server_port}"
        #: The same server under another name: another host, as far as a client knows.
        self.other_url = f"http://localhost:{self.httpd.server_port}"

    def gets(self, path: str) -> list[Seen]:
        return [request for request in self.seen if request.method == "GET" and request.path == path]

    def drop_all(self) -> None:
        """Cut every answer that is on its way."""
        self.generation += 1

    def wait_served(self, n_bytes: int) -> None:
        with self.grew:
            assert self.grew.wait_for(lambda: self.served >= n_bytes, timeout=60)


class HubHandler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    hub: FaultServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self) -> None:
        path = urlsplit(self.path).path
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.hub.seen.append(Seen(self.command, path, headers, self.headers["Host"]))
        try:
            if path.startswith("/api/models/"):
                self.model_info(path.removeprefix("/api/models/").partition("/revision/")[0])
            elif "/resolve/" in path:
                self.resolve(path)
            else:
                self.file(path, headers)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_GET = do_HEAD = answer

    def reply(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def has_access(self, repo: str) -> bool:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return repo not in self.hub.gated or token in self.hub.tokens

    def model_info(self, repo: str) -> None:
        if repo not in self.hub.repos:
            self.reply(401, {"X-Error-Message": "Invalid username or password."})
            return
        siblings = []
        for name, body in self.hub.repos[repo].items():
            digest = self.hub.lies.get(name) or sha(body)
            lfs = {"sha256": digest, "size": len(body), "pointerSize": 1}
            siblings.append({"rfilename": name, "size": len(body), "lfs": lfs})
        about = {"_id": "0", "id": repo, "sha": COMMIT, "siblings": siblings}
        about |= {"private": False, "tags": [], "downloads": 0}
        self.reply(200, {"Content-Type": "application/json"}, json.dumps(about).encode())

    def resolve(self, path: str) -> None:
        repo, _, revision_and_name = path.strip("/").partition("/resolve/")
        name = revision_and_name.partition("/")[2]
        body = self.hub.repos.get(repo, {}).get(name)
        if body is None:
            self.reply(404, {"X-Error-Code": "EntryNotFound"})
        elif not self.has_access(repo):
            self.reply(403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."})
        else:
            self.hub.files[f"/cdn/{repo}/{name}"] = body
            location = f"{self.hub.other_url}/cdn/{repo}/{name}?signature=once"
            self.reply(302, {"ETag": '"not-this-one"', "Location": location})

    def file(self, path: str, headers: dict[str, str]) -> None:
        asked = self.command == "GET" and self.hub.faults
        fault = self.hub.faults.popleft() if asked else None
        fault = fault or self.hub.always
        body = self.hub.files.get(path)
        if fault.status or body is None:
            self.reply(fault.status or 404, fault.headers)
            return
        etag = self.hub.etags.get(path, f'"{sha(body)[:16]}"')
        start, stop = self.span(headers, etag, fault, len(body))
        if start >= len(body) and start:
            self.reply(416, {"Content-Range": f"bytes */{len(body)}"})
            return
        self.body(body, start, stop, etag, fault)

    def span(self, headers: dict[str, str], etag: str, fault: Fault, size: int) -> tuple[int, int]:
        """Return the first byte and the end of the requested range; (0, size) is the whole file."""
        requested_range = headers.get("range", "")
        is_outdated = headers.get("if-range", etag) != etag and not fault.ignore_if_range
        if fault.ignore_range or not requested_range or is_outdated:
            return 0, size
        first, _, last = requested_range.removeprefix("bytes=").partition("-")
        return int(first), min(size, int(last) + 1) if last else size

    def body(self, body: bytes, start: int, stop: int, etag: str, fault: Fault) -> None:
        claimed = start if fault.wrong_start is None else fault.wrong_start
        partly = start or stop < len(body)
        self.send_response(206 if partly else 200)
        self.send_header("Accept-Ranges", "bytes")
        if etag and not (partly and fault.partial_without_etag):
            self.send_header("ETag", etag)
        if partly:
            total = len(body) + fault.extra_length
            self.send_header("Content-Range", f"bytes {claimed}-{stop - 1}/{total}")
        if fault.no_length:
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(stop - start + fault.extra_length))
        for name, value in fault.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault.wrong_byte_at is not None:
            changed = bytearray(body)
            changed[fault.wrong_byte_at] ^= 0xFF
            body = bytes(changed)
        self.pour(body[start:stop], fault)
        if fault.no_length or fault.extra_length:
            self.close_connection = True

    def pour(self, body: bytes, fault: Fault) -> None:
        stop = len(body) if fault.cut_after is None else min(len(body), fault.cut_after)
        step = fault.pace or 1 << 16
        generation = self.hub.generation
        for offset in range(0, stop, step):
            if self.hub.generation != generation:
                self.close_connection = True
                break
            piece = body[offset : min(offset + step, stop)]
            self.wfile.write(piece)
            self.wfile.flush()
            with self.hub.grew:
                self.hub.served += len(piece)
                self.hub.grew.notify_all()
            if fault.pace:
                self.hub.release.wait(0.002)
        if fault.silent:
            self.hub.release.wait(30)
        if fault.cut_after is not None or fault.silent:
            self.close_connection = True
            self.connection.close()


def sha(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
