"""A real web server with faults on order, which also speaks Hugging Face's protocol; and GGUF files
made to measure.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from edgeinfer.catalog.progress import Patience

COMMIT = "0123456789abcdef0123456789abcdef01234567"
#: Waits of microseconds instead of seconds, and a short belief in silence.
HASTY = Patience(attempts=3, pause_s=0.001, connect_s=5.0, silence_s=0.5)


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor_info(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    dims = b"".join(struct.pack("<Q", n) for n in shape)
    return text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


def gguf_bytes(
    entries: list[bytes] | None = None,
    tensors: list[tuple[str, int]] | None = None,
    *,
    version: int = 3,
    seed: int = 0,
) -> bytes:
    """A small valid GGUF. `tensors` are (name, number of 32-bit floats, a multiple of 8)."""
    entries = entries if entries is not None else model_entries()
    tensors = tensors if tensors is not None else [("token_embd.weight", 64), ("output_norm.weight", 8)]
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join(entries)
    offset = 0
    for name, n in tensors:
        head += tensor_info(name, (n,), 0, offset)
        offset += 4 * n
    head += b"\0" * (-len(head) % 32)
    return head + hashlib.shake_128(str(seed).encode()).digest(offset)


def model_entries() -> list[bytes]:
    return [
        entry("general.architecture", 8, text("llama")),
        entry("general.name", 8, text("Tiny")),
        entry("llama.block_count", 4, struct.pack("<I", 2)),
        entry("llama.context_length", 4, struct.pack("<I", 512)),
        entry("llama.embedding_length", 4, struct.pack("<I", 64)),
        entry("llama.attention.head_count", 4, struct.pack("<I", 4)),
        entry("llama.attention.head_count_kv", 4, struct.pack("<I", 2)),
        entry(
            "tokenizer.ggml.tokens",
            9,
            struct.pack("<IQ", 8, 80) + b"".join(text(f"t{i}") for i in range(80)),
        ),
        entry("tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, 80) + struct.pack("<80f", *range(80))),
    ]


@pytest.fixture
def make_gguf() -> Callable[..., bytes]:
    return gguf_bytes


@pytest.fixture
def hasty() -> Patience:
    return HASTY


@dataclass
class Fault:
    """What goes wrong with one answer. `cut_after`: bytes of the body before the connection is
    dropped.
    """

    status: int = 0
    cut_after: int | None = None
    ignore_range: bool = False
    wrong_byte_at: int | None = None
    extra_length: int = 0
    no_length: bool = False
    silent: bool = False
    wrong_start: int | None = None
    pace: int = 0
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Seen:
    """One request, as the server saw it."""

    method: str
    path: str
    headers: dict[str, str]
    host: str


class _QuietServer(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that is killed resets its connection: that is what the tests do."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class FaultServer:
    """Files by path, faults by order of GET requests, everything seen. `served` counts body bytes."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.etags: dict[str, str] = {}
        self.faults: deque[Fault | None] = deque()
        self.always = Fault()
        self.seen: list[Seen] = []
        self.served = 0
        self.grew = threading.Condition()
        self.release = threading.Event()
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.tokens: set[str] = set()
        self.lies: dict[str, str] = {}
        self.httpd = _QuietServer(("127.0.0.1", 0), _handler(self))
        self.httpd.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.httpd.server_port}"
        #: The same server under another name: another host, as far as a client knows.
        self.other_url = f"http://localhost:{self.httpd.server_port}"

    def gets(self, path: str) -> list[Seen]:
        return [one for one in self.seen if one.method == "GET" and one.path == path]

    def wait_served(self, n_bytes: int) -> None:
        with self.grew:
            assert self.grew.wait_for(lambda: self.served >= n_bytes, timeout=30)


def _handler(server: FaultServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = urlsplit(self.path).path
            headers = {name.lower(): value for name, value in self.headers.items()}
            server.seen.append(Seen(self.command, path, headers, self.headers["Host"]))
            try:
                if path.startswith("/api/models/"):
                    self.model_info(path.removeprefix("/api/models/").partition("/revision/")[0])
                elif "/resolve/" in path:
                    self.resolve(path)
                else:
                    self.file(path, headers)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def reply(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def allowed(self, repo: str) -> bool:
            given = self.headers.get("Authorization", "").removeprefix("Bearer ")
            return repo not in server.gated or given in server.tokens

        def model_info(self, repo: str) -> None:
            if repo not in server.repos:
                self.reply(401, {"X-Error-Message": "Invalid username or password."})
                return
            siblings = [
                {
                    "rfilename": name,
                    "size": len(body),
                    "lfs": {"sha256": sha(body), "size": len(body), "pointerSize": 1},
                }
                for name, body in server.repos[repo].items()
            ]
            about = {
                "_id": "0",
                "id": repo,
                "sha": COMMIT,
                "siblings": siblings,
                "private": False,
                "tags": [],
                "downloads": 0,
            }
            self.reply(200, {"Content-Type": "application/json"}, json.dumps(about).encode())

        def resolve(self, path: str) -> None:
            repo, _, rest = path.strip("/").partition("/resolve/")
            revision, _, name = rest.partition("/")
            body = server.repos.get(repo, {}).get(name)
            if body is None:
                self.reply(404, {"X-Error-Code": "EntryNotFound"})
            elif not self.allowed(repo):
                self.reply(
                    403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."}
                )
            else:
                server.files[f"/cdn/{repo}/{name}"] = body
                headers = {
                    "X-Repo-Commit": COMMIT,
                    "X-Linked-ETag": f'"{server.lies.get(name) or sha(body)}"',
                    "X-Linked-Size": str(len(body)),
                    "ETag": '"not-this-one"',
                    "Location": f"{server.other_url}/cdn/{repo}/{name}?signature=once",
                }
                assert revision
                self.reply(302, headers)

        def file(self, path: str, headers: dict[str, str]) -> None:
            fault = server.faults.popleft() if server.faults else None
            fault = fault or server.always
            body = server.files.get(path)
            if fault.status or body is None:
                self.reply(fault.status or 404, fault.headers)
                return
            etag = server.etags.get(path, f'"{sha(body)[:16]}"')
            start = self.start(headers, etag, fault)
            if start >= len(body) and start:
                self.reply(416, {"Content-Range": f"bytes */{len(body)}"})
                return
            self.body(body, start, etag, fault)

        def start(self, headers: dict[str, str], etag: str, fault: Fault) -> int:
            wanted = headers.get("range", "")
            if fault.ignore_range or not wanted or headers.get("if-range", etag) != etag:
                return 0
            return int(wanted.removeprefix("bytes=").partition("-")[0])

        def body(self, body: bytes, start: int, etag: str, fault: Fault) -> None:
            claimed = start if fault.wrong_start is None else fault.wrong_start
            self.send_response(206 if start else 200)
            if etag:
                self.send_header("ETag", etag)
            if start:
                self.send_header(
                    "Content-Range", f"bytes {claimed}-{len(body) - 1}/{len(body) + fault.extra_length}"
                )
            if fault.no_length:
                self.send_header("Connection", "close")
            else:
                self.send_header("Content-Length", str(len(body) - start + fault.extra_length))
            for name, value in fault.headers.items():
                self.send_header(name, value)
            self.end_headers()
            if fault.wrong_byte_at is not None:
                changed = bytearray(body)
                changed[fault.wrong_byte_at] ^= 0xFF
                body = bytes(changed)
            self.pour(body[start:], fault)
            if fault.no_length or fault.extra_length:
                self.close_connection = True

        def pour(self, body: bytes, fault: Fault) -> None:
            end = len(body) if fault.cut_after is None else min(len(body), fault.cut_after)
            step = fault.pace or 1 << 16
            for at in range(0, end, step):
                piece = body[at : min(at + step, end)]
                self.wfile.write(piece)
                self.wfile.flush()
                with server.grew:
                    server.served += len(piece)
                    server.grew.notify_all()
                if fault.pace:
                    server.release.wait(0.002)
            if fault.silent:
                server.release.wait(30)
            if fault.cut_after is not None or fault.silent:
                self.close_connection = True
                self.connection.close()

    return Handler


def sha(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


@pytest.fixture
def server() -> Iterator[FaultServer]:
    made = FaultServer()
    thread = threading.Thread(target=made.httpd.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield made
    made.release.set()
    made.httpd.shutdown()
    made.httpd.server_close()
    thread.join()


@pytest.fixture
def fault() -> type[Fault]:
    return Fault


@pytest.fixture
def sha256() -> Callable[[bytes], str]:
    return sha


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start_cli() -> Iterator[Start]:
    """Start the command line in a process of its own; whatever is left of it is killed at the end of
    the test.
    """
    running: list[subprocess.Popen[bytes]] = []

    def start(*argv: str, before: str = "", prefix: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        program = f"import sys\n{before}\nfrom edgeinfer.cli import main\nsys.exit(main(sys.argv[1:]))"
        process = subprocess.Popen(
            [*prefix, sys.executable, "-c", program, *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def user_models() -> Callable[[str], None]:
    """Write the user's models.toml."""

    def write(content: str) -> None:
        from edgeinfer.catalog.models import user_path

        user_path().parent.mkdir(parents=True, exist_ok=True)
        user_path().write_text(content)

    return write
