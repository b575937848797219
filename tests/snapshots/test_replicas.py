"""Replicas of an endpoint: resumed from one snapshot, killed under load."""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from other_processes import wait_until

from edgeinfer.platform.process_metadata import REPLICAS, read_process_record
from edgeinfer.runtime.options import ReplicasInfo

from .conftest import MODEL, Endpoint, Person

#: Tokens of an answer: the f16 cache of three such conversations is bit-identical in any batch.
_FEW = 16
pytestmark = [pytest.mark.model, pytest.mark.criu]

_CHAT = "/v1/chat/completions"


class Serving(Endpoint):
    """An endpoint with replicas of the small model."""

    def __init__(self, person: Person, *words: str) -> None:
        super().__init__(person, MODEL, "--log", "json", *words)
        #: Prompts whose answer has begun.
        self.begun: set[str] = set()

    @property
    def replicas(self) -> dict:
        return self.props.get("replicas") or {"running": []}

    def has(self, n: int) -> bool:
        return len(self.replicas["running"]) == n

    def apps(self) -> list[int]:
        """Return the pids of processes with a model, the endpoint's first."""
        return sorted(
            super().apps(), key=lambda pid: read_process_record(pid, REPLICAS, ReplicasInfo) is None
        )

    def cached_tokens(self, text: str) -> int:
        """Return how many tokens of a request were cached."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        usage = self.client.post(_CHAT, json=body).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    def stream(self, text: str, n: int) -> tuple[str, str]:
        """Return a stream's text, and the code of the error that ended it, or ""."""
        said, code = "", ""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": n, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True}
        with self.client.stream("POST", _CHAT, json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    code = event.get("error", {}).get("code", code)
                    for choice in event.get("choices", ()):
                        said += choice["delta"].get("content") or ""
                    if said:
                        self.begun.add(text)
        return said, code


@contextmanager
def streaming(ask: Callable[[str], object], texts: Iterable[str]) -> Iterator[None]:
    """Ask for each of `texts` in a thread during the block; wait for all answers."""
    clients = [threading.Thread(target=ask, args=(text,)) for text in texts]
    for client in clients:
        client.start()
    yield
    for client in clients:
        client.join()


def test_replicas_answer_as_one_engine_and_a_killed_one_loses_its_requests_alone(warm):
    questions = [f"Tell me story number {n}." for n in range(20)]
    with Serving(warm, "--threads", "2") as alone:
        expected = [alone.stream(text, _FEW)[0] for text in questions[:3]]
    with Serving(warm, "--threads", "2", "--replicas", "2") as serving:
        wait_until(lambda: serving.has(2), "two replicas")
        assert {replica["how"] for replica in serving.replicas["running"]} == {"resumed"}
        assert "small: 2 of 2 replicas: " in warm.run("ps").out
        answers: dict[str, tuple[str, str]] = {}

        def ask(text: str, n: int = _FEW) -> None:
            answers[text] = serving.stream(text, n)

        with streaming(ask, questions[:3]):
            pass
        assert [answers[text] for text in questions[:3]] == [(text, "") for text in expected]
        busy = [replica["completion_tokens_total"] for replica in serving.replicas["running"]]
        assert min(busy) >= _FEW

        text = "Once upon a time there was a fox. " * 60
        serving.stream(text, 1)
        assert all(serving.cached_tokens(f"{text} Question {n}?") > 400 for n in range(2))

        answers.clear()
        serving.begun.clear()
        with streaming(lambda text: ask(text, 64), questions):
            wait_until(
                lambda: sum(c["requests"] for c in serving.replicas["running"]) == 20,
                "all in a replica",
            )
            wait_until(lambda: len(serving.begun) > 8, "each to have begun: one computes eight at once")
            endpoint, victim, _ = serving.apps()
            assert read_process_record(endpoint, REPLICAS, ReplicasInfo) is not None
            os.kill(victim, signal.SIGKILL)
        codes = [code for _, code in answers.values()]
        assert len(codes) == 20
        assert 1 <= codes.count("model_unavailable") <= 8  # only the killed replica's requests fail
        assert codes.count("") == 20 - codes.count("model_unavailable")
        wait_until(lambda: serving.has(2), "another replica")
        assert serving.replicas["crashed_total"] == 1
        assert [replica["number"] for replica in serving.replicas["running"]] in ([1, 3], [2, 3])
        assert not Path(f"/proc/{victim}").exists()


def test_resumed_endpoint_tells_its_clients_users_apart(warm):
    with Serving(warm, "--replicas", "2") as serving:
        assert "models" in serving.client.get("/props").json()  # the client is this user or root
        if os.getuid() == 0:
            url = f"{serving.client.base_url}/props"
            other = subprocess.run(["curl", "-s", url], user=65534, capture_output=True, text=True)
            assert "user_not_allowed" in other.stdout


def test_replicas_of_a_model_without_a_snapshot_are_loaded(warm):
    with Serving(warm, "--resume", "never", "--replicas", "2", "--ctx", "1024") as serving:
        wait_until(lambda: serving.has(2), "two replicas")
        assert {replica["how"] for replica in serving.replicas["running"]} == {"cold"}
        assert serving.stream("Hello", 4)[1] == ""
