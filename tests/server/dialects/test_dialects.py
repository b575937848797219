"""Every route is found, and an error has the format of the API that its path belongs to."""

import pytest

from edgeinfer.server.app import OPERATIONS, match_route


def test_every_operation_is_found_under_its_path_and_method():
    for operation in OPERATIONS:
        route = match_route(operation.path.replace("{id}", "some-model"))
        assert route.methods[operation.method] is operation
        assert ("id" in route.params) == ("{id}" in operation.path)
        assert operation in route.dialect.operations


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/v1/messages", "anthropic"),
        ("/v1/messages/batches", "anthropic"),
        ("/v1/messagesx", "openai"),
        ("/v1/responses/resp_1", "responses"),
        ("/nowhere", "openai"),
        ("/api/nowhere", "ollama"),
    ],
)
def test_unknown_path_is_refused_in_the_dialect_of_the_nearest_path(path, dialect):
    assert match_route(path).dialect.name == dialect


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/batches"])
def test_refusals_have_the_envelope_of_the_path(live_server, path):
    refused = live_server.client.delete(path).json()
    assert refused["type"] == "error"
    assert refused["request_id"]
