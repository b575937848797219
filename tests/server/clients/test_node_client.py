"""The official packages of OpenAI and Ollama for Node against the real small model.

Skipped where there is no node.
"""

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

CACHE = Path(os.environ.get("EDGEINFER_TEST_NODE") or f"/var/tmp/edgeinfer-node-{os.getuid()}")
PACKAGES = ("openai@^7", "ollama@^0.6")


@pytest.fixture(scope="session")
def packages() -> Path:
    """The packages, installed once from the registry by name."""
    names = [package.partition("@")[0] for package in PACKAGES]
    if not all((CACHE / "node_modules" / name / "package.json").is_file() for name in names):
        CACHE.mkdir(parents=True, exist_ok=True)
        (CACHE / "package.json").write_text(
            '{"name": "edgeinfer-tests", "private": true, "type": "module"}'
        )
        npm = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", *PACKAGES]
        subprocess.run(npm, cwd=CACHE, check=True, capture_output=True, timeout=240)
    return CACHE


def _words(packages: Path, name: str, url: str) -> list[str]:
    """Run a script of this folder and return its lines."""
    script = packages / name
    shutil.copyfile(Path(__file__).with_name(name), script)
    done = subprocess.run(["node", script, url], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()


def test_openais_client_runs_every_route(real, packages):
    assert _words(packages, "openai_client.mjs", f"{real.url}/v1") == [
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


def test_ollamas_client_runs_every_route(real, packages):
    assert _words(packages, "ollama_client.mjs", real.url) == [
        "list",
        "show",
        "chat",
        "stream",
        "format",
        "tool",
        "generate",
        "embed",
        "ps",
        "errors",
    ]
