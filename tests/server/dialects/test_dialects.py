"""The endpoint needs only the `Dialect` of an API, and each error has that API's format."""

import msgspec
import pytest
from fake_engine import FakeEngine
from starlette.requests import Request
from starlette.responses import Response

from edgeinfer.server.app import DIALECTS, OPERATIONS, match_route
from edgeinfer.server.dialect import Dialect, Operation
from edgeinfer.server.openapi import document


class Sorry(msgspec.Struct):
    """An error's JSON body."""

    sorry: str


async def _hello(request: Request) -> Response:
    return Response(b"hello")


ANOTHER = Dialect(
    name="another",
    operations=(
        Operation(path="/hello", handler=_hello, summary="Greet.", method="POST", reply=Sorry),
    ),
    error_type=Sorry,
    error_body=lambda problem, request_id: msgspec.json.encode(Sorry(problem.message)),
    error_events=lambda problem, request_id: b"data: sorry\n\n",
)


def test_another_dialect_is_described():
    described = document((*DIALECTS, ANOTHER))
    refusal = described["paths"]["/hello"]["post"]["responses"]["503"]
    assert refusal["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Sorry"}


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
def test_refusals_have_the_envelope_of_the_path(serve, path):
    refused = serve(FakeEngine()).client.delete(path).json()
    assert refused["type"] == "error"
    assert refused["request_id"]
