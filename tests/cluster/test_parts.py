"""Settings, prefix hashes and the Host check of a Serve application, without a cluster."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from types import SimpleNamespace

import httpx2
import pytest
from starlette.requests import Request

from edgeinfer import prefix_affinity
from edgeinfer.cluster import front, messages, replica
from edgeinfer.cluster.front import FrontEnd
from edgeinfer.cluster.messages import Ack, Chunk, ResponseStart
from edgeinfer.errors import UsageError
from edgeinfer.server.limits import Limits


def _hashes(text: str, **more) -> tuple[int, ...]:
    return front.prefix_hashes({"messages": [{"role": "user", "content": text}], **more})


def test_requests_share_a_hash_per_common_stride() -> None:
    hashes, other = _hashes("a" * 5000 + "b"), _hashes("a" * 5000 + "c" * 3000)
    shared = [a == b for a, b in zip(hashes, other, strict=False)]
    assert shared == [True] * 4 + [False]
    assert _hashes("a" * 5000, tools=[{"name": "look"}])[0] != hashes[0]
    # fields outside the prompt do not change its hashes
    assert _hashes("a" * 5000, temperature=1)[:4] == hashes[:4]


def test_body_without_a_prompt_has_no_prefix_hashes() -> None:
    assert front.prefix_hashes(front.decode_json(b"")) == ()
    assert front.prefix_hashes(front.decode_json(b"{broken")) == ()
    assert front.prefix_hashes(front.decode_json(b"[1]")) == ()
    assert len(_hashes("x" * 10_000_000)) == 256
    assert front.requested_model({"model": 3}) == ""


def test_longest_prefix_decides_and_the_oldest_is_evicted() -> None:
    affinity = prefix_affinity.PrefixAffinity(max_entries=4)
    affinity.note((1, 2), "one")
    affinity.note((1, 3), "other")
    assert affinity.find((1, 2, 9), ("one", "other")) == "one"
    assert affinity.find((1, 2, 9), ("other",)) == "other"
    assert affinity.find((8,), ("one", "other")) is None
    affinity.note((5, 6), "one")
    assert affinity.find((2,), ("one",)) is None


def test_settings_of_one_model_are_read_as_ray_passes_them() -> None:
    read = messages.read_settings({"model": "small", "max_replicas": "4", "cpus": "2"})
    assert (read.models[0].max_replicas, read.models[0].cpus) == (4, 2)


@pytest.mark.needs("ray")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own modules
def test_removed_replica_has_the_time_of_an_endpoints_drain() -> None:
    from edgeinfer.cluster import app  # slow import: Ray

    assert Limits().drain_s + 3 < replica.ENDING_S
    for bound in (app._deployment(messages.ModelSettings(model="m")), app.application({"model": "m"})):
        config = bound._bound_deployment._deployment_config
        assert config.graceful_shutdown_timeout_s == replica.ENDING_S


@pytest.mark.parametrize("status", [200, 503])
def test_replica_is_healthy_only_if_its_endpoint_is(status: int, monkeypatch) -> None:
    process = SimpleNamespace(poll=lambda: None)
    monkeypatch.setattr(replica.EndpointReplica, "start", lambda *_: process)
    checked = replica.EndpointReplica(messages.ModelSettings(model="m"), "one")
    transport = httpx2.MockTransport(lambda _: httpx2.Response(status))
    checked._client = httpx2.AsyncClient(transport=transport, base_url="http://localhost")
    failure = pytest.raises(RuntimeError, match="not healthy")
    with failure if status == 503 else contextlib.nullcontext():
        asyncio.run(checked.check())


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"models": []},
        {"model": "small", "replicas": 3},
        {"model": "small", "max_replicas": 0},
        {"models": [{"model": "small"}, {"model": "small"}]},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        messages.read_settings(wrong)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("10.0.0.7:8000", 200),
        ("models.example", 200),
        ("evil.example", 403),
        ("localhost:1@evil.example", 403),
        ("", 400),
    ],
)
def test_foreign_host_is_refused_before_any_route(host: str, status: int) -> None:
    """Ray's proxy does not check Host: a web page could reach it by DNS rebinding."""
    front = FrontEnd({"small": lambda _: pytest.fail("forwarded")}, 1.0, ("models.example",))
    for path in ("/health", "/v1/models"):
        scope = _scope("GET", path) | {"headers": [(b"host", host.encode())] if host else []}
        assert asyncio.run(front.answer(Request(scope))).status_code == status


@pytest.mark.parametrize(
    ("raw", "target"),
    [
        ({"raw_path": b"/v1/models/a%2Fb%20c"}, "/v1/models/a%2Fb%20c?x=%26"),
        ({}, "/v1/models/a/b%20c?x=%26"),  # `raw_path` is optional in ASGI
    ],
)
def test_path_is_forwarded_as_it_came(raw: dict[str, bytes], target: str) -> None:
    scope = _scope("GET", "/v1/models/a/b c") | {"query_string": b"x=%26"} | raw
    assert _asked(scope, "a/b c") == [("a/b c", target)]


@pytest.mark.parametrize(
    ("method", "path", "model"),
    [
        ("GET", "/v1/models/second", "second"),
        ("GET", "/models/second", "second"),
        ("POST", "/v1/models/second/unload", "second"),
        ("GET", "/v1/responses/second", "first"),
        ("GET", "/props", "first"),
    ],
)
def test_model_in_the_path_decides_where_a_request_goes(method: str, path: str, model: str) -> None:
    assert _asked(_scope(method, path), "first", "second") == [(model, path)]


def _scope(method: str, path: str) -> dict[str, object]:
    headers = [(b"host", b"localhost")]
    return {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}


def _asked(scope: dict[str, object], *models: str) -> list[tuple[str, str]]:
    """Send a request to a front end with these models; return (model, target) of what it forwarded."""
    asked: list[tuple[str, str]] = []

    async def answer(name: str, request: messages.Request) -> AsyncIterator[Chunk]:
        asked.append((name, request.target))
        yield Ack("one")
        yield ResponseStart(200, ())

    front_end = FrontEnd({name: functools.partial(answer, name) for name in models}, 1.0)
    assert asyncio.run(front_end.answer(Request(scope, _no_body))).status_code == 200
    return asked


async def _no_body() -> dict[str, object]:
    return {"type": "http.request", "body": b"", "more_body": False}
