"""`make clients`: each client in an environment of its own, unmodified, two turns with a tool call.

    python tests/clients/run.py [NAME...]

Writes docs/figures/clients.md when all were asked for. Exit 1 when one failed.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path += [str(HERE), str(ROOT / "benchmarks"), str(ROOT / "tests/made")]

import common  # noqa: E402  it lies elsewhere
from install import build_cache, install, table  # noqa: E402

from edgeinfer.bench import markdown  # noqa: E402

FIRST = "Make a file hello.txt with the word hello in it."
SECOND = "Now say in a sentence what you did."
_SECONDS = 300
#: What `launch` asks itself.
_OF_LAUNCH = ("/props", "/v1/models/{id}/recall")
_SMALL = "smollm2-135m-instruct"


class Session(msgspec.Struct, kw_only=True):
    """What a client sent. Its second turn begins at `second` of `requests`; -1: the last with a prompt."""

    version: str = "?"
    failure: str = ""
    requests: list[dict[str, Any]] = []
    second: int = -1

    @property
    def calls(self) -> str:
        """The routes that it called, with how often; failed ones with their status."""
        named = Counter(
            request["route"] + (f" → {request['status']}" if request["status"] >= 400 else "")
            for request in self.requests
        )
        return ", ".join(f"{n} × `{route}`" for route, n in named.items())

    @property
    def hints(self) -> str:
        """List the ignored fields of its requests, and the moved lines."""
        values = [request.get(key) for request in self.requests for key in ("ignored", "normalized")]
        names = [name for value in values for name in _words(value)]
        return ", ".join(f"`{name}`" for name in dict.fromkeys(names)) or "–"

    @property
    def cached_tokens(self) -> str:
        """Cached tokens of the second turn's largest prompt."""
        later = self.requests if self.second < 0 else self.requests[self.second :]
        read = [request for request in later if request["prompt_tokens"]]
        if self.second < 0:
            read = read[-1:]
        if not read:
            return "–"
        largest = max(read, key=lambda request: request["prompt_tokens"])
        return f"{largest['cached_tokens']:,} of {largest['prompt_tokens']:,}"


def _words(value: Any) -> list[str]:
    return re.findall(r"[^,\s]+", value) if isinstance(value, str) else list(value or ())


class Server:
    """An endpoint in a process of its own, and its log."""

    def __init__(self, command: list[str], home: Path, environment: dict[str, str]) -> None:
        self._home = home
        self._log = home / "serve.log"
        with open(self._log, "wb") as out:
            self._process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=out, env={**os.environ, **environment}
            )
        self.url = ""

    def wait_ready(self) -> None:
        """Wait until the model is loaded. Raises AssertionError with the log when it ends instead."""
        while '"ready"' not in self._log.read_text():
            assert self._process.poll() is None, self._log.read_text()
            time.sleep(0.05)
        self.url = next(line["url"] for line in self._lines() if line["event"] == "listening")

    def requests(self) -> list[dict[str, Any]]:
        """Return the requests so far."""
        asked = [line for line in self._lines() if line["event"] == "request"]
        return [request for request in asked if request["route"] not in _OF_LAUNCH]

    def bodies(self) -> list[Path]:
        """Return the files with request bodies that the endpoint wrote (scripted.py)."""
        return sorted((self._home / "requests").iterdir())

    def _lines(self) -> list[dict[str, Any]]:
        """Return the objects of the log, without lines of the launcher and unfinished ones."""
        lines = self._log.read_bytes().splitlines(keepends=True)
        whole = (line for line in lines if line.startswith(b"{") and line.endswith(b"\n"))
        return list(map(msgspec.json.decode, whole))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


@contextlib.contextmanager
def servers() -> Iterator[Any]:
    """Yield a function that returns the endpoint with an engine, which it starts if necessary."""
    with (
        tempfile.TemporaryDirectory(prefix="edgeinfer-clients-") as folder,
        contextlib.ExitStack() as stack,
    ):
        running: dict[str, Server] = {}

        def at(engine: str) -> Server:
            if engine not in running:
                home = Path(folder) / engine
                (home / "ei/config").mkdir(parents=True)
                (home / "ei/config/config.toml").write_text("[snapshots]\nauto-warm = false\n")
                (home / "ei/data").mkdir()
                (home / "ei/data/models").symlink_to(build_cache() / "test-home/data/models")
                (home / "requests").mkdir()
                command = [sys.executable, str(HERE / "scripted.py"), str(home / "requests")]
                if engine == "model":
                    command = [sys.executable, "-m", "edgeinfer", "serve", _SMALL]
                    command += ["--ctx", "8192", "--port", "0", "--log", "json"]
                running[engine] = Server(command, home, {"EDGEINFER_HOME": str(home / "ei")})
                stack.callback(running[engine].close)
                running[engine].wait_ready()
            return running[engine]

        yield at


def drive(name: str, server: Server, model: str) -> Session:
    """Install a client, and run its session."""
    client = table()[name]
    programs = install(name)
    begin = len(server.requests())
    session = Session()
    try:
        if "agent" in client:
            session.second = _agent(client, programs, server) - begin
            session.version = re.split("[=@]", (client.get("python") or client["node"])[0])[-1]
        else:
            session.version = _program(client, programs, server.url, model)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        session.failure = str(error)
    session.requests = server.requests()[begin:]
    return session


def _program(client: dict[str, Any], programs: Path, url: str, model: str) -> str:
    """Run a script with the client's packages; return the version that it prints last."""
    script, program = HERE / "sessions" / client["session"], str(programs / "python")
    if script.suffix == ".mjs":  # imports are looked for in the file's folder
        program, source = "node", script
        script = programs.parents[1] / source.name
        script.write_text(source.read_text())
    return _run([program, str(script), url, model], {}, Path.cwd()).split()[-1]


def _agent(client: dict[str, Any], programs: Path, server: Server) -> int:
    """Have two turns through `edgeinfer launch`; return the number of requests before the second."""
    with tempfile.TemporaryDirectory(prefix="edgeinfer-agent-") as folder:
        home = Path(folder) / "home"
        work = Path(folder) / "work"
        home.mkdir()
        work.mkdir()
        config = home / "config.toml"
        config.write_text(f"[serve]\nport = {server.url.rpartition(':')[2]}\n")
        environment = {
            "HOME": str(home),
            "PWD": str(work),  # some believe it
            "EDGEINFER_HOME": str(home / "ei"),
            "EDGEINFER_CONFIG": str(config),
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        }
        launch = [sys.executable, "-m", "edgeinfer", "launch", client["agent"]]
        said = _run([*launch, *client["first"], FIRST], environment, work)
        file = work / "hello.txt"
        assert file.is_file(), f"no file was made: {said}"
        before = len(server.requests())
        said = _run([*launch, *client["second"], SECOND], environment, work)
        assert "second turn" in said, f"the second turn was not answered: {said}"
        return before


def _run(command: list[str], environment: dict[str, str], folder: Path) -> str:
    """Return the output of a program. Raises AssertionError with it when it fails."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": "", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout


def main() -> int:
    """Drive the clients that were named, or all."""
    clients = sys.argv[1:] or list(table())
    rows, failed = [], []
    with servers() as url_of:
        for name in clients:
            engine = table()[name]["engine"]
            session = drive(name, url_of(engine), _SMALL if engine == "model" else "reader")
            failed += [name] if session.failure else []
            outcome = "failed" if session.failure else session.cached_tokens
            print(f"{name} {session.version}: {outcome} {session.failure}", flush=True)
            rows.append([name, session.version, engine, session.calls, session.hints, outcome])
    head = ["client", "version", "answers", "calls", "hints and moved lines", "cached in turn 2"]
    text = markdown(head, rows)
    if sys.argv[1:]:
        print(text)
    else:
        common.write_figure(ROOT / "docs/figures", "clients", text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
