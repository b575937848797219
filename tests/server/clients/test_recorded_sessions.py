"""Recorded sessions of agents (tests/clients/record.py): later requests prefill only new tokens."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from made_decoders import make_reader

RECORDED = Path(__file__).parents[2] / "clients/recorded"
AGENTS = ("aider", "claude", "codex", "goose", "opencode", "opencode-plan", "pi", "qwen")
#: Agents that change earlier turns, so that no cached prefix matches: qwen-code lists the folder again
#: when it continues a session, and aider writes its history into one turn.
REWRITES_ITS_PAST = ("aider", "qwen")
MORE_THAN_NEW = 64
#: Tokens that are new in each request: goose adds the time, its folder and its tasks.
NOTE = {"goose": 96}
BILLING = "x-anthropic-billing-header: cc_version=2.1.330.{}; cc_entrypoint=cli;"

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def live_server(smollm2, serve_module, load_model, tmp_path_factory):
    """Serve a model that tokenizes as SmolLM2 and prefills thousands of tokens a second."""
    path = make_reader(tmp_path_factory.mktemp("reader") / "reader.gguf", smollm2, 65_536)
    return serve_module(load_model(path, "reader", n_ctx=65_536))


def _session(agent: str) -> list[dict[str, Any]]:
    """Return the requests of the main conversation: those with the largest number of tools."""
    raw = json.loads(lzma.decompress((RECORDED / f"{agent}.json.xz").read_bytes()))
    requests = raw["requests"]
    most = max(len(request["body"].get("tools") or ()) for request in requests)
    return [request for request in requests if len(request["body"].get("tools") or ()) == most]


def _prefill(live_server, agent: str, request: dict[str, Any], salt: str) -> tuple[int, int]:
    """Send a recorded request with 0 answer tokens; return its prompt tokens and cached tokens."""
    user_agent = request["user_agent"] if agent != "pi" else "pi/launched"  # recorded without `launch`
    limits = {"/v1/responses": "max_output_tokens"}
    limit = limits.get(request["path"], "max_tokens")
    body = request["body"] | {"model": "reader", "stream": False, limit: 0, "cache_salt": salt}
    body.pop("stream_options", None)
    body.pop("max_completion_tokens", None)
    headers = {"user-agent": user_agent}
    live_server.post(request["path"], body, headers=headers, timeout=120, status=200)
    (slot,) = live_server.get("/slots").json()["slots"][:1]
    return slot["n_prompt_tokens"], slot["cache_n"]


@pytest.mark.parametrize("agent", AGENTS)
def test_session_prefills_only_new_tokens(live_server, agent):
    session = _session(agent)
    assert len(session) >= 2
    before = 0
    for number, request in enumerate(session):
        n_prompt, n_cached = _prefill(live_server, agent, request, agent)
        resumed = number == len(session) - 1 and agent in REWRITES_ITS_PAST
        if number and not resumed:
            assert n_prompt - n_cached <= n_prompt - before + MORE_THAN_NEW + NOTE.get(agent, 0)
        before = n_prompt


def test_second_session_of_claude_code_finds_the_cached_prefix(live_server):
    """The billing line of Claude Code, which `edgeinfer launch` switches off, differs."""
    first, *_ = _session("claude")
    read = []
    for billing in ("0e0", "f8c"):
        line = {"type": "text", "text": BILLING.format(billing)}
        body = first["body"] | {"system": [line, *first["body"]["system"]]}
        read.append(_prefill(live_server, "claude", {**first, "body": body}, "billing"))
    n_prompt, n_cached = read[1]
    assert n_prompt - n_cached <= MORE_THAN_NEW
