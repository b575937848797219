"""The tool `fetch` with local servers: hosts, addresses, redirects, sizes, content types."""

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from edgeinfer.tools import web
from edgeinfer.tools.tool_use import Stop, StoppedError
from edgeinfer.tools.web import Web

HERE = ("127.0.0.1",)
#: Spellings of addresses that are not public.
PRIVATE = """
    127.0.0.1 localhost 2130706433 0x7f.1 0 [::1] [::ffff:127.0.0.1] [64:ff9b::7f00:1] [2002:7f00:1::]
    169.254.169.254 10.0.0.1 [fe80::1] 224.0.0.1
""".split()


@pytest.fixture
def pages():
    """A server whose answer to each path is (status, headers, body), or a function of the handler."""
    answers, asked = {}, []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers["Host"]))
            answer = answers[self.path]
            if callable(answer):
                answer(self)
                return
            status, headers, body = answer
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1], answers, asked
        server.shutdown()
        thread.join()


def fetch(url, hosts=HERE, stop=None):
    result = Web(hosts, ("fetch",)).call("fetch", {"url": url}, stop)
    return f"error: {result.text}" if result.is_error else result.text


TEXT = (200, {"Content-Type": "text/plain; charset=latin-1"}, "Grüße".encode("latin-1"))


@pytest.mark.parametrize("hosts", [HERE, ("127.0.0.0/8",), ("localhost", "127.0.0.1", "::1")])
def test_listed_hosts_are_asked_by_their_name(pages, hosts):
    port, answers, asked = pages
    answers["/a?b=1"] = TEXT
    name = hosts[0] if hosts[0][0] == "l" else "127.0.0.1"
    assert fetch(f"http://{name}:{port}/a?b=1", hosts) == "Grüße"
    assert asked == [("/a?b=1", f"{name}:{port}")]


@pytest.mark.parametrize(
    ("url", "hosts", "said"),
    [
        ("http://127.0.0.1:{port}/", ("*.example.org",), "not listed"),
        ("http://example.org.evil.test/", ("*.example.org", "example.org"), "not listed"),
        ("http://example.org@127.0.0.1:{port}/", ("*.example.org", "example.org"), "not listed"),
        ("http://a:b@127.0.0.1:{port}/", HERE, "without user name and password"),
        ("file:///etc/passwd", ("*",), "http or https"),
        ("gopher://127.0.0.1:{port}/", HERE, "http or https"),
        ("http://localhost:{port}/", ("localhost",), "private address"),
        *((f"http://{host}:{{port}}/", ("*",), "private address") for host in PRIVATE),
        ("not an address", HERE, "error"),
    ],
)
def test_others_are_refused_before_a_connection(pages, url, hosts, said):
    port, _, asked = pages
    assert said in fetch(url.format(port=port), hosts)
    assert asked == []


def test_each_redirect_is_checked(pages):
    port, answers, asked = pages
    answers["/page"] = TEXT
    answers["/here"] = (302, {"Location": "/page"}, b"")
    answers["/away"] = (302, {"Location": f"http://127.0.0.2:{port}/page"}, b"")
    answers["/file"] = (302, {"Location": "file:///etc/passwd"}, b"")
    answers["/loop"] = (302, {"Location": "/loop"}, b"")
    address = f"http://127.0.0.1:{port}"
    assert fetch(f"{address}/here") == "Grüße"
    assert "127.0.0.2 is not listed" in fetch(f"{address}/away")
    with pytest.raises(Exception, match="redirects to a file: address"):
        fetch(f"{address}/file")
    assert "more than 5 redirects" in fetch(f"{address}/loop")
    assert {path for path, _ in asked} == set(answers)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((404, {"Content-Type": "text/plain"}, b""), "answers 404"),
        ((200, {"Content-Type": "image/png"}, b""), "sends image/png"),
        ((200, {}, b"x"), "sends an unknown type"),
        ((200, {"Content-Type": "text/plain"}, b"x" * (3 << 20)), "more than 2 MiB"),
        ((200, {"Content-Type": "text/plain", "Content-Encoding": "gzip"}, b""), "not requested"),
        ((200, {"Content-Type": "text/plain; charset=hex"}, b"ok"), "ok"),
        ((200, {"Content-Type": "application/ld+json"}, b"{}"), "{}"),
        (
            (200, {"Content-Type": "text/html"}, b"<html><h1>a</h1><script>x</script><p>b &lt; c"),
            "b < c",
        ),
        (lambda handler: handler.wfile.write(b"nonsense\r\n\r\n"), "error"),
    ],
)
def test_answers(pages, answer, said):
    port, answers, _ = pages
    answers["/"] = answer
    assert said in fetch(f"http://127.0.0.1:{port}/")


def test_a_slow_page_is_ended(pages, monkeypatch):
    monkeypatch.setattr(web, "_TIMEOUT_S", 0.5)
    port, answers, _ = pages

    def drip(handler):
        handler.send_response(200)
        handler.send_header("Content-Type", "text/plain")
        handler.end_headers()
        with contextlib.suppress(OSError):
            while True:
                handler.wfile.write(b"x")

    answers["/"] = drip
    assert "took more than 0.5 s" in fetch(f"http://127.0.0.1:{port}/")


@pytest.mark.parametrize("headers", [True, False])
def test_stop_ends_a_fetch(pages, monkeypatch, headers):
    monkeypatch.setattr(web, "_TIMEOUT_S", 300.0)
    port, answers, _ = pages
    stop, shut = Stop(), threading.Event()
    waited = []

    def wait(handler):
        if headers:
            handler.send_response(200)
            handler.send_header("Content-Type", "text/plain")
            handler.end_headers()
        stop.set()
        waited.append(shut.wait(60))

    answers["/"] = wait
    with pytest.raises(StoppedError):
        fetch(f"http://127.0.0.1:{port}/", stop=stop)
    assert waited == []
    shut.set()


def test_redirects_are_followed_no_longer_than_a_page_may_take(pages, monkeypatch):
    port, answers, asked = pages
    stop = Stop()
    answers["/"] = (302, {"Location": "/"}, b"")
    monkeypatch.setattr(web, "_TIMEOUT_S", 0.0)
    assert "took more than 0 s" in fetch(f"http://127.0.0.1:{port}/")
    stop.set()
    with pytest.raises(StoppedError):
        fetch(f"http://127.0.0.1:{port}/", stop=stop)
    assert asked == []


def test_without_hosts_it_is_not_offered():
    assert "tools.fetch-hosts" in Web((), ("fetch",)).unavailable()
    assert Web(("example.org",), ("read",)).tools() == []
