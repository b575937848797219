"""The Serve application on a real Ray cluster of several nodes; replicas and nodes are killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path

import httpx2
import pytest
from other_processes import free_port, wait_until

from edgeinfer.cluster.front import REPLICA_HEADER

pytestmark = [pytest.mark.model, pytest.mark.needs("ray"), pytest.mark.timeout(600)]
_CHAT = "/v1/chat/completions"


class Application:
    """A running application, the processes of its replicas, and a client."""

    def __init__(self, port: int, home: Path, metrics: list[int]) -> None:
        self.home = home
        #: Ports at which the nodes export Ray's metrics.
        self.metrics = metrics
        self.client = httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=300)

    def chat(self, model: str, text: str, **fields) -> httpx2.Response:
        return self.client.post(_CHAT, json=_body(model, text, **fields))

    def is_answering(self) -> bool:
        try:
            return self.chat("small", "Hello.").is_success
        except httpx2.TransportError:  # Ray is restarting the front end
            return False

    def processes(self, *arguments: str) -> list[int]:
        """Return the pids of this application whose command line has all of `arguments`."""
        pids = []
        for folder in Path("/proc").iterdir():
            try:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                environment = (folder / "environ").read_bytes()
            except (OSError, ValueError):
                continue
            if str(self.home).encode() in environment and all(word in command for word in arguments):
                pids.append(int(folder.name))
        return pids

    def replicas(self, model: str) -> list[int]:
        """Return the pids of Ray's replicas of a model."""
        return self.processes(f"ray::ServeReplica:default:{model}")

    def endpoints(self, model: str) -> list[int]:
        """Return the pids of the endpoints that the replicas of a model started."""
        replicas = self.replicas(model)
        pids = self.processes("edgeinfer.cluster.child_endpoint", f" serve {model} ")
        return [pid for pid in pids if _parent(pid) in replicas]


def _body(model: str, text: str, **fields) -> dict[str, object]:
    said = [{"role": "user", "content": text}]
    return {"model": model, "messages": said, "max_tokens": 8, "temperature": 0, **fields}


@pytest.fixture(scope="module")
def app(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    home = tmp_path_factory.mktemp("cluster")
    folder = tempfile.mkdtemp(prefix="ei")  # short, because the paths of Ray's sockets contain it
    Path(folder, "ray").mkdir()
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("EDGEINFER", "RAY"))
    }
    environment = inherited | {
        "EDGEINFER_HOME": str(home),
        "RAY_TMPDIR": folder,  # where a cluster writes its address, in a folder `ray`
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_metrics_report_interval_ms": "500",
    }
    for name in ("small", "twins"):
        pull = [sys.executable, "-m", "edgeinfer", "pull", str(smollm2), "--name", name, "--in-place"]
        subprocess.run([*pull, "--quiet"], env=environment, check=True)
    models = [
        {"model": "small", "max_replicas": 1},
        {"model": "twins", "min_replicas": 2, "max_replicas": 2},
    ]
    port = free_port()
    command = [sys.executable, str(Path(__file__).with_name("start.py")), folder, str(port)]
    with subprocess.Popen(
        [*command, json.dumps({"models": models})],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        assert started.stdout
        assert started.stdin
        until_ready = takewhile(lambda line: line != "ready\n", started.stdout)
        said = dict(line.strip().partition(" ")[::2] for line in until_ready)
        running = Application(port, home, [int(port) for port in said["metrics"].split()])
        yield running
        running.client.close()
        started.stdin.close()
        started.wait(120)
    shutil.rmtree(folder, ignore_errors=True)


def test_replica_starts_with_the_first_request_and_answers_every_dialect(app: Application) -> None:
    listed = app.client.get("/v1/models").json()
    assert [card["id"] for card in listed["data"]] == ["small", "twins"]
    refused = app.client.post("/v1/messages", json={"model": "nobody", "max_tokens": 1, "messages": []})
    assert refused.status_code == 404
    assert refused.json()["error"]["type"] == "not_found_error"  # Anthropic's type of the error
    assert app.endpoints("small") == []

    said = [{"role": "user", "content": "Name three colours."}]
    asked = {"model": "small", "max_tokens": 8, "temperature": 0, "messages": said}
    answer = app.client.post("/v1/messages", json=asked)
    chat = app.chat("small", "Name three colours.")
    assert answer.json()["content"][0]["text"] == chat.json()["choices"][0]["message"]["content"] != ""
    assert len(app.endpoints("small")) == 1
    wrong = app.client.post(_CHAT, json={"model": "small", "messages": "none"})
    assert wrong.status_code == 400


def test_disconnected_client_ends_its_generation(app: Application) -> None:
    with app.client.stream(
        "POST", _CHAT, json=_body("small", "Count.", max_tokens=4000, ignore_eos=True, stream=True)
    ) as streaming:
        next(streaming.iter_raw())

    def idle() -> bool:
        lines = app.client.get("/metrics").text.splitlines()
        running = [line for line in lines if line.startswith("edgeinfer_num_requests_running{")]
        return running and all(line.endswith(" 0.0") for line in running)

    wait_until(idle, "the generation ends")


def test_requests_are_routed_to_the_replica_with_their_prefix(app: Application) -> None:
    def one(text: str, max_tokens: int = 40) -> str:
        answer = app.chat("twins", text, max_tokens=max_tokens, ignore_eos=True)
        return answer.headers[REPLICA_HEADER]

    for attempt in range(
        10
    ):  # Serve may route two requests to one replica before it knows that it is busy
        texts = [f"{word}{attempt} " * 400 for word in ("first", "second")]
        with ThreadPoolExecutor(2) as pool:  # the answers are long: neither ends before both are routed
            readers = list(pool.map(one, texts, [400, 400]))
        if len(set(readers)) == 2:
            break
    assert len(set(readers)) == 2
    for text, reader in zip(texts, readers, strict=True):
        assert [one(f"{text} {n}") for n in range(3)] == [reader] * 3


def test_ray_exports_the_metrics_of_each_endpoint(app: Application) -> None:
    app.chat("twins", "Hello.")

    def has_metrics() -> bool:
        urls = [f"http://127.0.0.1:{port}/metrics" for port in app.metrics]
        texts = [httpx2.get(url, timeout=60).text for url in urls]
        lines = [line for text in texts for line in text.splitlines()]
        name = "ray_edgeinfer_generation_tokens_total{"
        counters = [line for line in lines if line.startswith(name)]
        return any('deployment="twins"' in line and 'model_name="twins"' in line for line in counters)

    wait_until(has_metrics, "the tokens that were generated")


@pytest.mark.parametrize("victim", ["replica", "node"])
def test_kill_in_the_middle_of_a_stream_ends_it_with_an_error(app: Application, victim: str) -> None:
    """The endpoint ends with its replica, and the next request is answered.

    If the front end was on the killed node, the connection is cut.
    """
    app.chat("small", "Hello.")
    replica = app.replicas("small")[0]
    endpoint = app.endpoints("small")[0]
    body = _body("small", "Tell me everything.", max_tokens=4000, ignore_eos=True, stream=True)
    with app.client.stream("POST", _CHAT, json=body) as stream:
        pieces = stream.iter_raw()
        next(pieces)
        is_front_hit = victim == "node" and _parent(app.replicas("edgeinfer")[0]) == _parent(replica)
        os.kill(replica if victim == "replica" else _parent(replica), signal.SIGKILL)
        if is_front_hit:
            with pytest.raises(httpx2.TransportError):
                b"".join(pieces)
        else:
            answer_rest = b"".join(pieces)
            assert b"replica_ended" in answer_rest
            assert answer_rest.endswith(b"data: [DONE]\n\n")
    wait_until(lambda: not Path(f"/proc/{endpoint}").exists(), "its endpoint ends")
    wait_until(app.is_answering, "somebody answers")


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
