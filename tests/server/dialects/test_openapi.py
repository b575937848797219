"""The OpenAPI document is valid and complete, and schemathesis finds no request that contradicts it."""

import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import FakeEngine
from other_processes import run

from edgeinfer.server.app import DIALECTS, OPERATIONS
from edgeinfer.server.limits import Limits
from edgeinfer.server.model_entry import LoadedEngine
from edgeinfer.server.openapi import document

#: Random examples per operation, in addition to those for each schema's edges. `make fuzz-http` uses
#: more.
EXAMPLES = int(os.environ.get("EDGEINFER_FUZZ_EXAMPLES", "3"))
#: The check that each request that fits the schema is accepted. It would fail, because a JSON schema
#: cannot say, for example, that tool_choice must name one of the tools.
LEFT_OUT = "positive_data_acceptance"


def test_every_operation_is_described_with_its_errors():
    doc = document(DIALECTS)
    assert {(m.upper(), p) for p, methods in doc["paths"].items() for m in methods} == {
        (o.method, o.path) for o in OPERATIONS
    }
    for methods in doc["paths"].values():
        for operation in methods.values():
            assert {"200", "400", "401", "403", "503"} <= set(operation["responses"])
            assert operation["summary"]


def _objects(schema: Any) -> Iterator[dict]:
    """Yield all objects of a JSON value, at any depth."""
    if isinstance(schema, dict):
        yield schema
    for inner in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(inner, dict | list):
            yield from _objects(inner)


def test_every_number_of_a_request_has_a_range():
    """A negative or huge number is refused by its type in every field."""
    doc = document(DIALECTS)
    schemas: dict[str, dict] = {}
    operations = [operation for path in doc["paths"].values() for operation in path.values()]
    waiting = [operation["requestBody"] for operation in operations if "requestBody" in operation]
    while waiting:
        for schema in _objects(waiting.pop()):
            if schema.get("type") in ("integer", "number"):
                assert {"minimum", "exclusiveMinimum"} & schema.keys(), schema
                assert {"maximum", "exclusiveMaximum"} & schema.keys(), schema
            name = str(schema.get("$ref", "")).rpartition("/")[2]
            if name and name not in schemas:
                schemas[name] = doc["components"]["schemas"][name]
                waiting.append(schemas[name])
    assert len(schemas) > 20


def test_the_document_is_served(serve):
    assert serve().client.get("/openapi.json").json() == json.loads(json.dumps(document(DIALECTS)))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("engine", "phases", "examples", "at_least"),
    [
        pytest.param(
            *("scripted", "examples,coverage,fuzzing", EXAMPLES, 300), marks=pytest.mark.needs("fuzz")
        ),
        ("real", "examples,fuzzing", 4 * EXAMPLES, 100),
    ],
)
def test_schemathesis_finds_no_case_where_the_document_is_wrong(
    serve, tmp_path, chatterer, engine, phases, examples, at_least
):
    make = chatterer if engine == "real" else lambda: FakeEngine([["a", "b"]])
    limits = Limits(max_requests=1000)
    live_server = serve(load=lambda *_: LoadedEngine(engine=make()), limits=limits)
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{live_server.url}/openapi.json"]
    command += ["--max-examples", str(examples), "--phases", phases]
    command += ["--exclude-checks", LEFT_OUT, "--seed", "1", "--no-color"]
    command += ["--suppress-health-check", "all", "--generation-database", "none"]
    command += ["--request-timeout", "60"]  # seconds; a busy machine exceeds the default of 10
    done = run(*command, cwd=tmp_path, timeout=1700)
    cases = int(re.search(r"([\d,]+) generated", done.stdout)[1].replace(",", ""))
    print(f"{cases} cases")
    assert cases >= at_least
    assert '"event":"internal"' not in live_server.log.getvalue()
