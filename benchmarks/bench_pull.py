"""One file over one connection and over several, from a server that limits each and one that does not.

The server is a process of its own on the loopback; every round takes the numbers of connections in turn.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path

from common import add_out, write_figure

from edgeinfer.models.fetching import download
from edgeinfer.models.progress import Job, RetryPolicy

_PIECE = 1 << 16


class Handler(BaseHTTPRequestHandler):
    """Serves ranges of one file, each connection at most at `rate` bytes per second (0: no limit)."""

    protocol_version = "HTTP/1.1"
    path_of_file = ""
    rate = 0

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        with open(self.path_of_file, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            start, end = int(first), min(size, int(last) + 1) if last else size
            self.send_response(206 if "Range" in self.headers else 200)
            headers = {"ETag": '"one"', "Accept-Ranges": "bytes", "Content-Length": str(end - start)}
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            began = time.monotonic()
            for at in range(start, end, _PIECE):
                os.sendfile(self.connection.fileno(), file.fileno(), at, min(_PIECE, end - at))
                ahead = self.rate and (at - start) / self.rate - (time.monotonic() - began)
                if ahead > 0:
                    time.sleep(ahead)


def serve(path: str, rate: int, said: Connection) -> None:
    """Serve `path` until killed; the port is sent through `said`."""
    handler = type("Limited", (Handler,), {"path_of_file": path, "rate": rate})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that has enough hangs up
    said.send(server.server_port)
    server.serve_forever()


def timed(url: str, size: int, digest: str, connections: int, work: Path) -> float:
    """Bytes per second of one download, whose bytes are checked afterwards."""
    folder = Path(tempfile.mkdtemp(dir=work))
    remote = download.Remote(url=url, file_name="x.gguf", origin=url)
    job = Job(retry_policy=RetryPolicy(connections=connections))
    began = time.monotonic()
    part = download.fetch(remote, folder, job)
    took = time.monotonic() - began
    with open(part, "rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == digest
    shutil.rmtree(folder)
    return size / took


def rates_of(rate: int, size: int, options: argparse.Namespace, work: Path) -> dict[int, list[float]]:
    """Rates by number of connections, from a server with this limit a connection."""
    path = work / f"file-{size}"
    path.write_bytes(os.urandom(1 << 20) * (size >> 20))
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(str(path), rate, theirs))
    server.start()
    try:
        url = f"http://127.0.0.1:{ours.recv()}/x.gguf"
        found: dict[int, list[float]] = {n: [] for n in options.connections}
        for _ in range(options.rounds):
            for n in options.connections:
                found[n].append(timed(url, size, digest, n, work))
        return found
    finally:
        server.kill()
        server.join()
        path.unlink()


def rows_of(name: str, found: dict[int, list[float]]) -> list[str]:
    """The table's rows of one server."""
    one = statistics.median(next(iter(found.values())))
    rows = []
    for n, rates in found.items():
        middle = statistics.median(rates)
        spread = f"{min(rates) / 1e6:,.0f}–{max(rates) / 1e6:,.0f}"
        rows.append(f"| {name} | {n} | {middle / 1e6:,.0f} MB/s | {spread} | {middle / one:.1f} × |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=10, help="MB/s of one connection")
    parser.add_argument("--connections", default="1,2,4,8,16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", default=None, help="where the files are written")
    add_out(parser)
    options = parser.parse_args()
    options.connections = [int(n) for n in options.connections.split(",")]
    work = Path(tempfile.mkdtemp(prefix="edgeinfer-pull-", dir=options.work))
    try:
        limited = rates_of(options.limit * 1_000_000, 32 << 20, options, work)
        free = rates_of(0, 512 << 20, options, work)
    finally:
        shutil.rmtree(work)
    head = ["| server | connections | median | min–max | beside one |", "|---|---|---|---|---|"]
    rows = rows_of(f"{options.limit} MB/s a connection, 34 MB", limited) + rows_of(
        "loopback without a limit, 537 MB", free
    )
    print(write_figure(options.out, "pull", "\n".join([*head, *rows]) + "\n"))


if __name__ == "__main__":
    main()
