"""The official OpenAI package for Node against the real small model. Skipped where there is no node."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
]

CACHE = Path(os.environ.get("EDGEINFER_TEST_NODE") or "/var/tmp/edgeinfer-node")
SCRIPT = Path(__file__).with_name("openai_client.mjs")


@pytest.fixture(scope="session")
def packages() -> Path:
    """The `openai` package, installed once from the registry by name."""
    if not (CACHE / "node_modules/openai/package.json").is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        (CACHE / "package.json").write_text(
            '{"name": "edgeinfer-tests", "private": true, "type": "module"}'
        )
        npm = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", "openai@^7"]
        subprocess.run(npm, cwd=CACHE, check=True, capture_output=True, timeout=240)
    return CACHE


def test_the_node_client_runs_every_route(real, packages):
    script = packages / "openai_client.mjs"
    shutil.copyfile(SCRIPT, script)
    done = subprocess.run(
        ["node", script, f"{real.url}/v1"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == [
        "models",
        "chat",
        "stream",
        "n",
        "logprobs",
        "schema",
        "tool",
        "tool-stream",
        "completion",
        "embedding",
        "response",
        "response-stream",
        "errors",
    ]
