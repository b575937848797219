"""The curl commands of the README and docs/guides/serve.md, against the real small model."""

import json
import shutil
from pathlib import Path

import pytest
from least_requests import objects_of
from other_processes import run

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]


def _lines() -> list[str]:
    pages = (ROOT / "README.md", ROOT / "docs/guides/serve.md")
    lines = [line.strip() for page in pages for line in page.read_text("utf-8").splitlines()]
    return [line for line in lines if line.startswith("curl ")]


@pytest.mark.parametrize("line", _lines())
def test_a_documented_curl_line_works(real, line):
    assert "http://127.0.0.1:8080" in line
    command = line.replace("http://127.0.0.1:8080", real.url)
    done = run("bash", "-c", f"{command} --silent --show-error --fail")
    if "/infer" in line:
        assert json.loads(done.stdout)["result"]
    else:
        assert done.stdout.endswith("data: [DONE]\n\n")
        chunks = objects_of(done.stdout.splitlines())
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
