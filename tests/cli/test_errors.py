"""Every error class has a stable code, a message and an exit status."""

import json
import socket
from pathlib import Path

import pytest

from edgeinfer import error_text, errors
from edgeinfer.agents.endpoint import RemoteEndpoint
from edgeinfer.cli.result import SCHEMA, error_envelope
from edgeinfer.platform import listening
from edgeinfer.tools.mcp_transports import SessionEndedError


def test_every_code_has_a_row_in_the_docs():
    page = (Path(__file__).parents[2] / "docs/reference/errors.md").read_text()
    codes = [cls.code for cls in errors.every_class()]
    # a class of another module, without a row in the table
    assert SessionEndedError("").code == errors.ToolServerError.code
    assert [code for code in codes if f"| `{code}` |" not in page] == []
    assert len(codes) == len(set(codes))
    assert errors.ModelNotPulledError.code == "model-not-pulled"


@pytest.mark.parametrize("cls", errors.every_class(), ids=lambda c: c.__name__)
def test_every_error_has_a_message_and_an_exit_code(cls):
    error = cls("it broke")
    said = "it broke" if cls is errors.InterruptedByUser else "error: it broke"
    assert error_text.describe_error(error).startswith(said)
    assert 1 <= error_text.exit_code(error) <= 130
    body = json.loads(error_envelope(error))
    assert body["schema"] == SCHEMA
    assert body["ok"] is False
    assert body["error"] == {"code": cls.code, "message": "it broke", "hint": error_text.hint(error)}


def test_hint_of_an_error_replaces_the_tables():
    error = errors.ModelNotPulledError("no", hint="edgeinfer pull x")
    assert error_text.describe_error(error) == "error: no\n\nhint: edgeinfer pull x"


def test_address_hints_fit_the_client_and_the_server():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(errors.ServeError) as refused:
            listening.bind("127.0.0.1", port)
    assert "--port 0" in error_text.hint(refused.value)
    with pytest.raises(errors.ServeError) as silent:
        RemoteEndpoint(url=f"http://127.0.0.1:{port}", model="m").request("GET", "/health")
    assert error_text.hint(silent.value) == "check the address, and that the server runs there"


def test_class_without_a_row_takes_its_parents():
    assert errors.DecodeError not in error_text.TABLE
    assert error_text.row(errors.DecodeError) == error_text.row(errors.EngineError)
