"""Host, Origin, Sec-Fetch-Site, CORS, API keys and their file, TLS."""

import argparse
import os
import ssl
import stat
import subprocess

import httpx2
import pytest
from raw_http import exchange, get, status

from edgeinfer.cli.endpoint_setup import bind, limits, make_gate
from edgeinfer.cli.parser import build_parser
from edgeinfer.config.config_file import Config, ServeConfig
from edgeinfer.errors import ServeError, UsageError
from edgeinfer.host import EngineHost
from edgeinfer.server.app import OPERATIONS
from edgeinfer.server.guards import keys
from edgeinfer.server.guards.keys import Keys
from edgeinfer.server.guards.security import LOOPBACK_HOSTS, OPEN_ROUTES, Gate
from edgeinfer.server.lifecycle import RunOptions
from edgeinfer.server.problems import Problem

KEY = "test-key-0123456789abcdef"
PAGE = "https://page.example"


def _options(*typed: str) -> argparse.Namespace:
    return build_parser("serve").parse_args(["serve", *typed])


@pytest.fixture(scope="module")
def live_server(serve_module):
    return serve_module(gate=Gate(keys=Keys([]), origins=frozenset({PAGE})))


@pytest.fixture(scope="module")
def keyed_server(serve_module):
    return serve_module(gate=Gate(keys=Keys([KEY, "another-key-0123456789"])))


EVERY_ROUTE = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: f"{o.method} {o.path}")


@EVERY_ROUTE
def test_foreign_hosts_and_pages_are_refused_on_every_route(live_server, operation):
    for headers, reason in (
        ({"host": "evil.example"}, "is not a name of this endpoint"),
        ({"origin": "https://evil.example"}, "is not allowed"),
    ):
        answer = live_server.client.request(
            operation.method,
            operation.path.replace("{id}", "fake"),
            headers=headers,
            content=b"{}" if operation.method == "POST" else None,
        )
        assert answer.status_code == 403
        assert reason in answer.text


@pytest.mark.parametrize(
    ("hosts", "status"),
    [
        ("localhost LOCALHOST:1 127.0.0.1:9 [::1]:8080 localhost.", 200),
        ("evil.example:8080 127.0.0.1.evil.example localhost.evil.example 0.0.0.0 localhost:port", 403),
        ("localhost:1@evil.example [::1]evil.example [::1 localhost.. :80 a/b", 403),
    ],
)
def test_hosts_are_compared_whole(live_server, hosts, status):
    for host in hosts.split():
        assert live_server.get("/health", headers={"host": host}).status_code == status, host


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost:3000"}, 403),
        ({"origin": "https://page.example.evil"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"origin": PAGE}, 200),
        ({"origin": PAGE, "sec-fetch-site": "cross-site"}, 200),
    ],
)
@pytest.mark.parametrize("path", ["/health", "/infer?prompt=x", "/v1/models", "/api/tags", "/"])
def test_other_web_pages_are_refused(live_server, headers, status, path):
    assert live_server.get(path, headers=headers).status_code == status


def test_the_endpoints_own_origin_is_no_other_page(live_server):
    assert live_server.get("/health", headers={"origin": live_server.url}).status_code == 200


def test_cors_answers_named_origins_only(live_server):
    ask = {"access-control-request-method": "POST"}
    for asked, allowed in (("authorization, x-stainless-os",) * 2, ("x<y", "content-type")):
        headers = ask | {"origin": PAGE, "access-control-request-headers": asked}
        answer = live_server.client.options("/v1/chat/completions", headers=headers)
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-allow-headers"] == allowed
        assert "access-control-allow-credentials" not in answer.headers
    evil = ask | {"origin": "https://evil.example"}
    refused = live_server.client.options("/v1/chat/completions", headers=evil)
    assert refused.status_code == 403
    assert "access-control-allow-origin" not in refused.headers
    got = live_server.get("/v1/models", headers={"origin": PAGE})
    assert (got.headers["access-control-allow-origin"], got.headers["vary"]) == (PAGE, "Origin")
    failed = live_server.get("/nowhere", headers={"origin": PAGE})
    assert failed.headers["access-control-allow-origin"] == PAGE


def test_a_request_without_a_host_is_refused(live_server):
    assert status(exchange(live_server.port, b"GET /health HTTP/1.1\r\n\r\n")) == 400


@EVERY_ROUTE
def test_a_key_is_wanted_on_every_route_but_health(keyed_server, operation):
    answer = keyed_server.client.request(operation.method, operation.path.replace("{id}", "fake"))
    if operation.path in OPEN_ROUTES:
        assert answer.status_code == 200
    else:
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": f"Bearer {KEY}"}, 200),
        ({"authorization": f"bearer {KEY}"}, 200),
        ({"x-api-key": KEY}, 200),
        ({"authorization": "Bearer another-key-0123456789"}, 200),
        ({"authorization": f"Bearer {KEY}x"}, 401),
        ({"authorization": f"Basic {KEY}"}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"x-api-key": KEY[:-1]}, 401),
    ],
)
def test_keys_are_compared_whole(keyed_server, headers, status):
    assert keyed_server.get("/v1/models", headers=headers).status_code == status


def test_another_users_program_is_refused_without_a_key(serve, stranger):
    live_server = serve(gate=Gate(keys=Keys([]), owner=os.getuid()))
    with stranger():
        refused = exchange(live_server.port, get("/v1/models"))
        assert status(refused) == 403
        assert b"any-user" in refused
        assert b"user_not_allowed" in exchange(live_server.port, get("/slots"))
        assert status(exchange(live_server.port, get("/health"))) == 200


def test_the_users_own_program_is_answered_without_a_key(serve):
    live_server = serve(gate=Gate(keys=Keys([]), owner=os.getuid()))
    for path in ("/v1/models", "/metrics"):
        assert live_server.get(path).status_code == 200


def test_any_user_may_ask_and_change_nothing(serve, stranger):
    live_server = serve(gate=Gate(keys=Keys([]), owner=os.getuid(), any_user=True))
    with stranger():
        assert status(exchange(live_server.port, get("/v1/models"))) == 200
        for request in (get("/v1/models/fake/unload", method="POST"), get("/metrics")):
            assert b"admin_only" in exchange(live_server.port, request)


def test_a_key_is_enough_for_another_user(serve, stranger):
    live_server = serve(gate=Gate(keys=Keys([KEY]), owner=os.getuid()))
    with stranger():
        assert status(exchange(live_server.port, get("/v1/models", f"x-api-key: {KEY}"))) == 200


ADMIN = [operation for operation in OPERATIONS if operation.is_admin]


@pytest.mark.parametrize("operation", ADMIN, ids=lambda o: f"{o.method} {o.path}")
def test_second_key_administers_nothing(keyed_server, operation):
    path = operation.path.replace("{id}", "fake")
    asked = {"content": b"{}"} if operation.method == "POST" else {}
    headers = ({"x-api-key": key} for key in ("another-key-0123456789", KEY))
    ask = keyed_server.client.request
    second, first = (ask(operation.method, path, headers=sent, **asked) for sent in headers)
    assert second.status_code == 403
    assert "admin_only" in second.text or "first API key" in second.text
    assert "first API key" not in first.text


def test_routes_that_affect_other_clients_are_admin_only():
    assert {operation.path for operation in ADMIN} >= {
        "/v1/models/{id}/unload",
        "/v1/models/{id}/snapshot",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/metrics",
        "/api/pull",
        "/api/delete",
    }


@pytest.mark.parametrize("name", ["-rf", ".", "..", "_x", "a/b", "a b"])
def test_snapshot_is_named_by_letters_and_digits_first(live_server, name):
    refused = live_server.post("/v1/models/fake/snapshot", {"name": name})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "name")


def test_second_key_does_not_decide_how_long_a_model_stays(serve):
    live_server = serve(gate=Gate(keys=Keys([KEY, "another-key-0123456789"])), keep_alive_s=7000)
    for key, stays in (("another-key-0123456789", True), (KEY, False)):
        headers = {"x-api-key": key}
        body = {"messages": [{"role": "user", "content": "x"}], "keep_alive": 1}
        reply = live_server.post("/v1/chat/completions", body, headers=headers)
        assert ("keep_alive" in reply.headers.get("x-edgeinfer-ignored", "")) is stays
        (model,) = live_server.get("/props", headers=headers).json()["models"]
        assert (model["expires_in_s"] > 6000) is stays


def test_no_key_reaches_the_log(keyed_server):
    keyed_server.get("/v1/models", headers={"authorization": f"Bearer {KEY}"})
    assert KEY not in keyed_server.log.getvalue()
    assert Keys([KEY]).name(KEY) in keyed_server.log.getvalue()


def test_a_key_is_made_once_with_0600_for_a_bind_beyond_loopback(capsys):
    (listener,) = bind("0.0.0.0", 0)
    with listener:
        gate = make_gate(_options(), EngineHost(config=Config()), [listener])
        path = keys.key_path()
        key = path.read_text().strip()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert len(key) > 40
        assert gate.keys.name(key)
        assert key not in "".join(capsys.readouterr())
        again = make_gate(_options(), EngineHost(config=Config()), [listener])
        assert again.keys.name(key)
        assert path.read_text().strip() == key
        gate.check_host({"host": "192.168.1.7:8080"})
        with pytest.raises(Exception, match="not a name of this endpoint"):
            gate.check_host({"host": "evil.example"})


def test_loopback_needs_no_key():
    (listener,) = bind("127.0.0.1", 0)
    with listener:
        gate = make_gate(_options(), EngineHost(config=Config()), [listener])
        assert not gate.keys
        assert (gate.owner, gate.any_user) == (os.getuid(), False)
        any_user = Config(serve=ServeConfig(any_user=True))
        assert make_gate(_options(), EngineHost(config=any_user), [listener]).any_user
    assert not keys.key_path().exists()


def test_a_given_key_is_taken_from_environment_or_file(monkeypatch, tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"# ours\n{KEY}\n\nanother-key-0123456789\n")
    file.chmod(0o600)
    assert keys.configured_keys(str(file)).name("another-key-0123456789")
    monkeypatch.setenv("EDGEINFER_API_KEY_FILE", str(file))
    assert keys.configured_keys().name(KEY)
    monkeypatch.setenv("EDGEINFER_API_KEY", "from-environment-1234")
    assert keys.configured_keys().name("from-environment-1234")
    assert not keys.configured_keys().name(KEY)


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        (KEY, 0o644),
        (KEY, 0o640),
        (KEY, 0o604),
        ("", 0o600),
        ("# nothing\n", 0o600),
        ("short\n", 0o600),
        ("a b " * 9, 0o600),
    ],
)
def test_a_key_file_that_is_open_to_others_or_without_a_usable_key_is_refused(tmp_path, text, mode):
    file = tmp_path / "keys"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(ServeError) as refused:
        keys.configured_keys(str(file))
    assert (refused.value.hint == f"chmod 600 {file}") is (mode != 0o600)


def test_a_missing_key_file_is_named_with_its_option(monkeypatch, tmp_path):
    missing = str(tmp_path / "none")
    with pytest.raises(ServeError, match="--api-key-file names"):
        keys.configured_keys(missing)
    monkeypatch.setenv("EDGEINFER_API_KEY_FILE", missing)
    with pytest.raises(ServeError, match="EDGEINFER_API_KEY_FILE names"):
        keys.configured_keys()


def test_hint_for_a_key_file_without_keys_makes_the_file_usable(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# nothing\n")
    file.chmod(0o600)
    with pytest.raises(ServeError) as refused:
        keys.configured_keys(str(file))
    command = refused.value.hint.partition("`")[2].rstrip("`")
    subprocess.run(command, shell=True, check=True)
    assert len(keys.configured_keys(str(file))) == 1


def test_typed_hosts_and_origins_are_accepted_and_star_is_not():
    typed = _options("--allow-host", "Box.lan", "--allow-host=other.lan", "--allow-origin", PAGE)
    (listener,) = bind("127.0.0.1", 0)
    with listener:
        gate = make_gate(typed, EngineHost(config=Config()), [listener])
        assert {"box.lan", "other.lan", *LOOPBACK_HOSTS} <= gate.hosts
        assert gate.origins == {PAGE}
    for page_of_a_file in ("null", "file://"):
        assert [*_options("--allow-origin", page_of_a_file).allow_origin] == [page_of_a_file]
    for wrong in ("*", "foo", "https://Models.example", "https://models.example/"):
        with pytest.raises(UsageError, match="is not an origin, such as"):
            _options("--allow-origin", wrong)
    for wrong in ("https://models.example", "models.example:80", ".", "[models"):
        with pytest.raises(UsageError, match="is not a name without port"):
            _options("--allow-host", wrong)


def test_host_suffix_accepts_only_subdomains():
    gate = Gate(keys=Keys([]), hosts=frozenset({".svc.cluster.local"}))
    gate.check_host({"host": "edgeinfer.default.svc.cluster.local:80"})
    for other in ("svc.cluster.local", "evilsvc.cluster.local", "svc.cluster.local.evil.example"):
        with pytest.raises(Problem):
            gate.check_host({"host": other})


def test_invalid_host_header_is_refused_whatever_hosts_are_allowed():
    with pytest.raises(Problem):
        Gate(keys=Keys([]), hosts=frozenset({""})).check_host({"host": "not a host"})


def test_tls_needs_both_files(tmp_path):
    for option, missing in (("--tls-cert", "--tls-key"), ("--tls-key", "--tls-cert")):
        with pytest.raises(UsageError, match=f"{option} needs") as caught:
            limits(_options(option, "a"))
        assert missing in (caught.value.hint or "")
    with pytest.raises(ServeError):
        limits(_options("--tls-cert", str(tmp_path / "a"), "--tls-key", str(tmp_path / "b")))


@pytest.mark.parametrize("content", [None, b"", b"junk", b"\xff\xfe\0"])
def test_bad_files_of_keys_and_certificates_are_refused_in_words(tmp_path, content):
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
        file.chmod(0o600)
    for path in (file, tmp_path):
        with pytest.raises(ServeError):
            limits(_options("--tls-cert", str(path), "--tls-key", str(path)))
        with pytest.raises(ServeError):
            keys.configured_keys(str(path))


def test_tls_is_served(serve, tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 "
        f"-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {cert}"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    live_server = serve(options=RunOptions(tls_cert=str(cert), tls_key=str(key)))
    with httpx2.Client(timeout=60, verify=ssl.create_default_context(cafile=str(cert))) as client:
        assert client.get(f"{live_server.url}/health").json()["status"] == "ok"
        body = {"messages": [{"role": "user", "content": "x"}]}
        answer = client.post(f"{live_server.url}/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"] == "Hello world"


def test_impossible_bind_raises_serve_error():
    (listener,) = bind("127.0.0.1", 0)
    with listener:
        taken_port = listener.getsockname()[1]
        with pytest.raises(ServeError, match=str(taken_port)):
            bind("127.0.0.1", taken_port)
    for host in ("no.such.host.invalid", "203.0.113.7"):
        with pytest.raises(ServeError):
            bind(host, 0)
