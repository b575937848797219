"""Two users of one machine at one endpoint cannot reach each other's data."""

import json
import os

import httpx2
import pytest
from fake_engine import FakeEngine

from edgeinfer.server.app import OPERATIONS
from edgeinfer.server.guards.keys import Keys
from edgeinfer.server.guards.security import Gate
from edgeinfer.server.problems import Problem

URL = "/v1/chat/completions"


def _as_other_user(
    another_user, live_server, path: str, method: str = "", **body: object
) -> tuple[int, bytes]:
    """Send one request as another user; return status and body."""
    with another_user(), httpx2.Client(base_url=live_server.url, timeout=60) as client:
        reply = client.request(method or ("POST" if body else "GET"), path, **body)
        return reply.status_code, reply.content


def test_users_of_one_machine_share_no_response(serve, another_user):
    gate = Gate(keys=Keys([]), owner=os.getuid(), any_user=True)
    live_server = serve(FakeEngine(), gate=gate, store_responses=True)
    response_id = live_server.post("/v1/responses", {"input": "x"}).json()["id"]
    for operation in OPERATIONS:
        if "{id}" in operation.path and not operation.path.startswith("/v1/models"):
            path = operation.path.replace("{id}", response_id)
            status, _ = _as_other_user(another_user, live_server, path, operation.method)
            assert status in (400, 403, 404), (operation.method, path)
    assert live_server.get(f"/v1/responses/{response_id}").status_code == 200
    assert json.loads(_as_other_user(another_user, live_server, "/slots")[1])["slots"] == []


def test_prefixes_of_two_users_are_salted(serve, another_user):
    engine = FakeEngine()
    live_server = serve(engine, gate=Gate(keys=Keys([]), owner=os.getuid(), any_user=True))
    body = {"messages": [{"role": "user", "content": "x"}]}
    live_server.post(URL, body)
    _as_other_user(another_user, live_server, URL, json=body)
    mine, other_salt = (request.cache_salt for request in engine.requests)
    assert not mine
    assert other_salt


def test_request_without_a_connection_is_refused():
    gate = Gate(keys=Keys([]), owner=os.getuid())
    with pytest.raises(Problem, match="user"):
        gate.caller("", None)
