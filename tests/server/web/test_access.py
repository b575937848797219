"""Sign-in of the page: one-time codes, cookies, the first API key."""

import hashlib
import os
import time
import webbrowser
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
import raw_http
from fake_engine import FakeEngine
from served_endpoint import with_page

from edgeinfer.agents.endpoint import RemoteEndpoint
from edgeinfer.cli.verbs import web
from edgeinfer.errors import ServeError
from edgeinfer.host import EngineHost
from edgeinfer.platform import paths
from edgeinfer.platform.paths import private_dir
from edgeinfer.server.app import OPERATIONS, match_route
from edgeinfer.server.guards.keys import Keys
from edgeinfer.server.guards.security import Gate
from edgeinfer.server.web import routes
from edgeinfer.server.web.access import make_code
from edgeinfer.server.web.routes import WEB

KEYS = ("first-key-0123456789", "second-key-0123456789")
GUARDED = [operation for operation in WEB.operations if operation.web == "cookie"]
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def ask_for(live_server, operation, **kw):
    path = operation.path.replace("{id}", "1")
    return live_server.client.request(operation.method, path, **kw)


def test_every_operation_of_the_page_is_open_or_wants_the_cookie():
    unguarded = {operation.path for operation in WEB.operations if operation.web == "open"}
    assert unguarded == {"/web", "/web/static/{id}", "/web/session"}
    assert not [guarded for guarded in OPERATIONS if guarded.web]
    assert all(guarded.web for guarded in WEB.operations)


@pytest.mark.parametrize("operation", GUARDED, ids=lambda o: f"{o.method} {o.path}")
def test_requests_without_the_cookie_are_refused(serve, operation):
    live_server = with_page(serve())
    for cookie in ("", "edgeinfer-1=x", f"edgeinfer-{live_server.port}=99999999999-abc", "=;;"):
        answer = ask_for(live_server, operation, headers={"cookie": cookie}, json={})
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "not_signed_in"


@pytest.mark.parametrize("operation", WEB.operations, ids=lambda o: f"{o.method} {o.path}")
def test_foreign_hosts_and_origins_are_refused(serve_page, operation):
    page = serve_page()
    for headers in (
        {"host": "evil.example"},
        {"origin": "https://evil.example"},
        {"origin": "http://localhost:3000"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site"},
    ):
        path = operation.path.replace("{id}", "1")
        url = f"{page.live_server.url}{path}"
        answer = page.client.request(operation.method, url, headers=headers, json={})
        assert answer.status_code == 403, headers


def test_a_code_is_good_once_for_two_minutes_at_a_running_endpoint(serve, monkeypatch):
    early = make_code()
    live_server = with_page(serve(keys=KEYS), KEYS)
    code = make_code()

    def sign_in(code):
        return live_server.client.post("/web/session", json={"code": code}).status_code

    assert sign_in(code) == 204
    assert sign_in(code) == 401  # it is valid only once
    assert sign_in(early) == 401  # it was made before the endpoint started
    assert sign_in(code[:-1] + "0") == sign_in("") == sign_in("a-b-c") == sign_in("é") == 401
    late = make_code()
    with monkeypatch.context() as patch:  # the clock was 10 minutes fast, and is now set back
        now = time.time()
        patch.setattr(time, "time", lambda: now - 600)
        assert sign_in(make_code()) == 204
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 121)
    assert sign_in(late) == 401


def test_cookie_is_limited_to_the_page_and_hidden_from_scripts(serve):
    live_server = with_page(serve())
    cookie = live_server.client.post("/web/session", json={"code": make_code()}).headers["set-cookie"]
    assert cookie.startswith(f"edgeinfer-{live_server.port}=")
    assert cookie.partition("; ")[2] == "Path=/web; Max-Age=2592000; HttpOnly; SameSite=Strict"


def test_a_restarted_endpoint_knows_its_cookies_and_no_other_port_does(serve_page, serve):
    page = serve_page()
    again = with_page(serve())
    value = next(iter(page.client.cookies.values()))
    stolen = {"cookie": f"edgeinfer-{again.port}={value}"}
    assert again.client.get("/web/setup", headers=stolen).status_code == 401
    again.endpoint.web.access._port = page.live_server.port
    assert page.client.get(f"{again.url}/web/setup").status_code == 200


def test_code_and_cookie_are_refused_for_another_user(serve, another_user):
    live_server = with_page(serve(keys=KEYS), KEYS)
    code = make_code()
    cookie = live_server.client.post("/web/session", json={"code": make_code()}).headers["set-cookie"]
    cookie = {"cookie": cookie.partition(";")[0]}
    with another_user(), httpx2.Client(base_url=live_server.url, timeout=60) as other:
        assert other.post("/web/session", json={"code": code}).status_code == 401
        assert other.get("/web/setup", headers=cookie).status_code == 401
        key = {"key": KEYS[0]}
        assert other.post("/web/session", json=key).status_code == 204  # the owner gave away the key
        assert other.get("/web/setup").status_code == 200
    assert live_server.client.get("/web/setup", headers=cookie).status_code == 200
    assert live_server.client.post("/web/session", json={"code": code}).status_code == 204


def test_this_users_browser_needs_no_code_where_no_key_is_needed(serve, another_user):
    live_server = with_page(serve(gate=Gate(keys=Keys([]), any_user=True, owner=os.getuid())))
    for forwarded in ({"x-forwarded-for": "10.0.0.1"}, {"forwarded": "for=10.0.0.1"}):
        assert live_server.client.post("/web/session", json={}, headers=forwarded).status_code == 401
    with another_user(), httpx2.Client(base_url=live_server.url, timeout=60) as other:
        assert other.post("/web/session", json={}).status_code == 401
    assert live_server.client.post("/web/session", json={}).status_code == 204
    assert live_server.client.get("/web/setup").status_code == 200


def test_a_browser_is_announced_and_gets_no_secret_in_its_arguments(serve, another_user, monkeypatch):
    live_server = with_page(serve(keys=KEYS), KEYS)
    assert live_server.client.post("/web/session", json={}).status_code == 401
    opened = []

    def open_browser(url):
        opened.append(url)
        return True

    monkeypatch.setattr(webbrowser, "open", open_browser)
    monkeypatch.setenv("DISPLAY", ":7")
    own_endpoint = RemoteEndpoint(url=live_server.url, model="fake")
    monkeypatch.setattr(web, "own_endpoint", lambda *_: own_endpoint)
    result = web.run(SimpleNamespace(model=None, json=False), EngineHost())
    assert (opened, result.opened) == ([live_server.url], True)
    with another_user(), httpx2.Client(base_url=live_server.url, timeout=60) as other:
        assert other.post("/web/session", json={}).status_code == 401
    assert live_server.client.post("/web/session", json={}).status_code == 204
    assert live_server.client.post("/web/session", json={}).status_code == 401  # it is valid once


def test_web_reports_that_it_started_an_endpoint(serve, monkeypatch, capfd):
    live_server = RemoteEndpoint(url=with_page(serve()).url, model="fake")
    monkeypatch.setattr("edgeinfer.agents.endpoint.start", lambda *_: (live_server, 4242))
    monkeypatch.setattr(EngineHost, "files", lambda *_, **__: None)
    for endpoint in (None, live_server):
        monkeypatch.setattr("edgeinfer.agents.endpoint.find", lambda *_, endpoint=endpoint: endpoint)
        web.run(SimpleNamespace(model=None, json=True), EngineHost())
        said = capfd.readouterr().err
        assert ("started an endpoint" in said) == (endpoint is None)
        assert ("`edgeinfer stop 4242`" in said) == (endpoint is None)


def test_a_sign_in_is_short_because_anyone_may_send_it(serve):
    live_server = with_page(serve(keys=KEYS), KEYS)
    assert live_server.client.post("/web/session", json={"code": "x" * 9000}).status_code == 413
    for length in ("content-length: 30000000", "transfer-encoding: chunked"):
        head = raw_http.head("/web/session", raw_http.JSON, length)
        body = b"2400\r\n" * (length[0] == "t") + b" " * 9216 + b"\r\n2400\r\n"  # the rest is not sent
        assert raw_http.status(raw_http.exchange(live_server.port, head + body)) == 413, length


def test_only_the_first_key_signs_in(serve, serve_page):
    page = serve_page(keys=KEYS)
    assert page.get("/setup")["default_model"] == "fake"
    client = page.live_server.client
    assert client.get("/", headers=BROWSER).status_code == 200  # the page itself holds no secret
    assert client.get("/").status_code == 401
    for key in (KEYS[1], "wrong"):
        assert client.post("/web/session", json={"key": key}).status_code == 401
    bearer = {"authorization": f"Bearer {KEYS[0]}"}
    assert client.get("/web/setup", headers=bearer).status_code == 401
    other = with_page(serve(keys=KEYS[1:]), KEYS[1:])
    other.endpoint.web.access._port = page.live_server.port
    assert page.client.get(f"{other.url}/web/setup").status_code == 401  # its first key differs


def test_a_secret_that_others_can_read_is_refused(serve):
    live_server = with_page(serve())
    make_code()
    path = paths.data_dir() / "web-secret"
    assert path.stat().st_mode & 0o777 == 0o600
    os.chmod(path, 0o644)
    with pytest.raises(ServeError, match="other users can read"):
        make_code()
    assert live_server.client.post("/web/session", json={"code": "x"}).status_code >= 400
    os.chmod(path, 0o600)
    path.write_bytes(b"short")
    with pytest.raises(ServeError, match="has 5 bytes, not 32"):
        make_code()


def test_root_serves_the_page_only_to_browsers(serve):
    live_server = with_page(serve())
    page = live_server.client.get("/", headers=BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    for rule in (
        "default-src 'none'",
        "script-src 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    ):
        assert rule in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["referrer-policy"] == "no-referrer"
    assert live_server.client.get("/").text == "edgeinfer is running"
    status = live_server.client.get("/status").json()
    assert status["health"]["status"] == "ok"
    assert status["requests"] == 0
    assert status.keys() == live_server.client.get("/props").json().keys()


def test_the_files_of_the_page_are_small_and_nothing_else_is_served(serve):
    live_server = with_page(serve())
    total = 0
    for name in (
        "index.html",
        "app.css",
        "app.js",
        "lib.js",
        "models.js",
        "playground.js",
        "evaluations.js",
        "preact.js",
        "icon.svg",
    ):
        answer = live_server.client.get(f"/web/static/{name}", headers={"accept-encoding": "gzip"})
        assert answer.status_code == 200
        assert answer.headers["content-encoding"] == "gzip"
        total += int(answer.headers["content-length"])
        headers = {"if-none-match": answer.headers["etag"]}
        again = live_server.client.get(f"/web/static/{name}", headers=headers)
        assert (again.status_code, again.content) == (304, b"")
    assert total < 80_000
    for name in ("../routes.py", "..%2froutes.py", "", "nothing.js", "/etc/passwd", "%2fetc%2fpasswd"):
        assert live_server.client.get(f"/web/static/{name}").status_code == 404


def test_endpoint_without_the_page_has_no_page_routes(serve):
    live_server = serve(FakeEngine())
    assert live_server.client.get("/", headers=BROWSER).text == "edgeinfer is running"
    for operation in WEB.operations:
        assert ask_for(live_server, operation, json={}).status_code == 404
    assert match_route("/web/setup").dialect is WEB


def test_the_vendored_file_is_the_one_that_its_notice_names():
    folder = Path(routes.__file__).with_name("static")
    digest = hashlib.sha256((folder / "preact.js").read_bytes()).hexdigest()
    assert digest in (folder / "preact.LICENSE.txt").read_text()


def test_report_outside_the_folder_is_not_served(serve_page):
    page = serve_page()
    assert page.get("/evaluations") == []
    outside = private_dir(paths.data_dir() / "evaluations").parent / "outside.md"
    outside.write_text("no report")
    for name in ("outside", "..%2Foutside", "%2e%2e%2foutside.md", "x"):
        assert page.client.get(f"/evaluations/{name}").status_code == 404
