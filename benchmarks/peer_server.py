"""Servers that benchmarks start and ask: edgeinfer's endpoint with a home, and llama-server as a peer."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import ROOT, call, free_port, memory_of, peer_command, peer_program, tree_of, wait_healthy

from edgeinfer import bench
from edgeinfer.bench import Target

EDGEINFER = [sys.executable, "-m", "edgeinfer"]
WORDS = "river bread clock wool bridge owl glass map tide salt bell ink stone lamp rope seed".split()
#: With pictures, `content` is a list of parts.
Messages = list[dict[str, Any]]
Rows = list[dict[str, Any]]


@dataclass
class Answer:
    """One streamed answer: seconds since the request's first byte, and the usage block."""

    text: str = ""
    first_s: float = 0.0
    total_s: float = 0.0
    stamps: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def n_cached(self) -> int:
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    @property
    def n_computed(self) -> int:
        return int(self.usage["prompt_tokens"]) - self.n_cached


def ask(port: int, messages: Messages, *, n: int = 16, model: str = "", **more: Any) -> Answer:
    """Stream one greedy chat completion."""
    body = {"model": model, "messages": messages, "max_tokens": n, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}, **more}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=900)
    answer, began = Answer(), time.perf_counter()
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{response.status}: {response.read()[:400]!r}")
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        answer.usage = event.get("usage") or answer.usage
        for choice in event.get("choices") or ():
            if text := choice["delta"].get("content"):
                answer.stamps.append(time.perf_counter() - began)
                answer.text += text
    connection.close()
    answer.total_s = time.perf_counter() - began
    answer.first_s = answer.stamps[0] if answer.stamps else answer.total_s
    return answer


def text_of(number: int, n_words: int) -> str:
    """Return words that differ from the first one on, so that no two conversations share a prefix."""
    return f"Story {number}. " + " ".join(
        f"{WORDS[(number * 7 + i * i) % len(WORDS)]} {WORDS[(number + i) % len(WORDS)]}"
        for i in range(n_words // 2)
    )


def conversation(number: int, n_words: int) -> Messages:
    return [{"role": "user", "content": text_of(number, n_words) + ". Go on."}]


class Side:
    """One server that can be restarted with the same home."""

    def __init__(self, name: str, command: list[str], model: str, environment: dict[str, str]) -> None:
        self.name = name
        self._command = command
        self.model = model
        self._environment = {**os.environ, **environment}
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Start the server; return the seconds from exec to healthy."""
        self.port = free_port()
        began = time.perf_counter()
        command = [word.replace("PORT", str(self.port)) for word in self._command]
        self._process = subprocess.Popen(
            command,
            env=self._environment,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_healthy(self.port, self._process, 600)
        return time.perf_counter() - began

    @property
    def pid(self) -> int:
        """Process id of what `start` started."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Kill all its processes (`kill -9`)."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
            self.kill()

    close = stop

    def ask(self, messages: Messages, **more: Any) -> Answer:
        return ask(self.port, messages, **{"model": self.model, **more})

    def unload(self, model: str) -> None:
        """Unload a model (only ours), and wait until it is gone."""
        call(self.port, f"/v1/models/{model}/unload")

    def private_mb(self) -> float:
        """Return the private memory of all its processes."""
        assert self._process is not None
        kinds = ("Private_Clean", "Private_Dirty")
        return sum(memory_of(pid, *kinds) for pid in tree_of(self._process.pid)) / (1 << 20)


def name_of(model: Path) -> str:
    """Return the name of a model file in a home of edgeinfer."""
    return model.stem.lower()


def ours(
    home: Path, model: Path, n_ctx: int, *, more_models: Sequence[Path] = (), parallel: int = 4
) -> Side:
    """Make a side of `edgeinfer serve` through its launcher, in a new home or one of an earlier run;
    warm, so that a start is a resume. It also serves `more_models`.
    """
    settings = home / "config/config.toml"
    name = name_of(model)
    environment = {"EDGEINFER_HOME": str(home)}
    verbs = []
    if not settings.exists():
        settings.parent.mkdir(parents=True)
        settings.write_text("[snapshots]\nauto-warm = false\n")
        for path in (model, *more_models):
            verbs.append(["pull", str(path), "--name", name_of(path), "--in-place", "--quiet"])
    verbs.append(["warm", name, "--ctx", str(n_ctx), "--parallel", str(parallel), "--quiet"])
    for arguments in verbs:
        subprocess.run(
            [*EDGEINFER, *arguments], env={**os.environ, **environment}, cwd=ROOT, check=True
        )
    command = [*EDGEINFER, "serve", name, "--port", "PORT", "--log", "off", "--ctx", str(n_ctx)]
    return Side("edgeinfer", [*command, "--parallel", str(parallel)], name, environment)


def theirs(model: Path, n_ctx: int, *, slots: int = 4, flags: Sequence[str] = ()) -> Side | None:
    """Make a side of `llama-server` with its defaults: a prompt cache in RAM of at most 8 GiB. `flags`
    come last. Returns None if there is no llama-server.
    """
    program = peer_program("llama-server")
    if program is None:
        return None
    command = peer_command(program, model, "PORT", slots=slots, n_ctx=n_ctx * slots)
    return Side("llama-server", [*command, *flags], model.stem, {})


class Server(Side):
    """A running llama-server that completes tokens. It inherits our libgomp spin count, so that only the
    programs differ.
    """

    def __init__(self, program: str, model: Path, *, slots: int, n_ctx: int, threads: int) -> None:
        command = peer_command(program, model, "PORT", slots=slots, n_ctx=n_ctx, threads=threads)
        super().__init__("llama-server", command, model.stem, {})
        self.start()
        self.target = Target(url=f"http://127.0.0.1:{self.port}")

    def stream(self, prompt: list[int], n: int, *, cache: bool) -> list[float]:
        """Generate n tokens greedily; return the arrival time of each, in seconds of time.perf_counter."""
        fields = {"max_tokens": n, "temperature": 0, "ignore_eos": True, "cache_prompt": cache}
        began = time.perf_counter()
        answer = asyncio.run(bench.ask(self.target, "/v1/completions", {"prompt": prompt, **fields}))
        textless = max(0, answer.completion_tokens - len(answer.arrivals))
        return [began + arrival_s for arrival_s in (*answer.arrivals, *answer.arrivals[-1:] * textless)]
