"""The route that takes a snapshot: access, arguments, errors."""

import pytest

from edgeinfer.errors import DiskFullError, UsageError
from edgeinfer.host import TakenSnapshot

PATH = "/v1/models/fake/snapshot"


def test_snapshot_is_taken_for_the_admin_key(serve):
    live_server = serve(keys=["secret"])
    asked = []

    def take(model: str, name: str) -> TakenSnapshot:
        asked.append((model, name))
        return TakenSnapshot(name=f"fake,{name}", disk_bytes=7, was_built=len(asked) == 1, seconds=0.5)

    live_server.endpoint.host.take_snapshot = take
    assert live_server.post(PATH, {"name": "x"}).status_code == 401
    key = {"authorization": "Bearer secret"}
    for state in ("taken", "unchanged"):
        answer = live_server.post(PATH, {"name": "x"}, headers=key)
        told = {"id": "fake", "snapshot": "fake,x", "disk_bytes": 7, "seconds": 0.5}
        assert answer.json() == told | {"state": state}
    assert asked == [("fake", "x"), ("fake", "x")]
    assert live_server.post(PATH, {"name": "../x"}, headers=key).status_code == 400
    assert live_server.post("/v1/models/nix/snapshot", {}, headers=key).status_code == 404


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (None, 409, "snapshots_unavailable"),
        (DiskFullError("no room"), 507, "disk_full"),
        (UsageError("has not loaded it"), 400, "usage"),
    ],
)
def test_snapshot_error_has_its_status_and_code(serve, error, status, code):
    live_server = serve()
    if error is not None:

        def fail(_model: str, _name: str) -> TakenSnapshot:
            raise error

        live_server.endpoint.host.take_snapshot = fail
    answer = live_server.post(PATH, {})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
