"""`edgeinfer launch`: run a coding agent, e.g. Claude Code, on a local model."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

from edgeinfer.agents import endpoint
from edgeinfer.agents.endpoint import RemoteEndpoint
from edgeinfer.agents.known_agents import AGENTS, Agent, AgentTarget, find_program, run_agent
from edgeinfer.cli.options import add_load_option
from edgeinfer.cli.parser import add_option
from edgeinfer.cli.result import Result
from edgeinfer.cli.terminal import table
from edgeinfer.config.config_file import Config
from edgeinfer.config.load_options import N_CTX
from edgeinfer.errors import ServeError
from edgeinfer.host import EngineHost
from edgeinfer.models.reference import resolve
from edgeinfer.server.guards import keys
from edgeinfer.shipping.shipped import program_file
from edgeinfer.snapshots.running import RunningLaunch, processes

#: Time (s) without a request after which an endpoint that was started for an agent exits. Its cached
#: prefixes stay on disk.
IDLE_EXIT_S = 600


class LaunchResult(Result, frozen=True, kw_only=True):
    agent: str
    model: str
    status: int

    @property
    def exit_code(self) -> int:
        return self.status


class KnownAgent(msgspec.Struct, frozen=True, kw_only=True):
    """A known agent: the path of its program ("" if not installed), and the command that installs it.

    `first_tokens` is the number of tokens in the agent's first request.
    """

    name: str
    title: str
    path: str
    install: str
    first_tokens: int


class AgentsResult(Result, frozen=True, kw_only=True):
    agents: tuple[KnownAgent, ...]

    def human(self) -> str:
        rows = [
            (agent.name, "yes" if agent.path else "-", f"{agent.first_tokens:,} tokens", agent.install)
            for agent in self.agents
        ]
        return table([("AGENT", "HERE", "FIRST REQUEST", "INSTALL"), *rows])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--model MODEL", "model (default: the endpoint's)")
    add_load_option(parser, N_CTX)
    names = tuple(AGENTS)
    parser.add_argument("agent", nargs="?", choices=names, metavar="AGENT", help=", ".join(names))
    help = "arguments passed to the agent unchanged"
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help=help)


def run(options: argparse.Namespace, host: EngineHost) -> Result:
    """Run an agent, or list the known ones. Raises UsageError, ServeError, errors of `host.files`."""
    if not options.agent:
        return AgentsResult(agents=tuple(map(_describe_agent, AGENTS.values())))
    agent = AGENTS[options.agent]
    find_program(agent)  # without the agent, fail before a model is loaded
    remote, model, n_ctx = _find_endpoint(agent, options, host)
    print(f"{agent.title} asks {model} at {remote.url}", file=sys.stderr)  # noqa: T201
    recalling = threading.Thread(target=_prefill_preamble, args=(agent, remote, model), daemon=True)
    recalling.start()
    target = AgentTarget(url=remote.url, model=model, n_ctx=n_ctx, key=remote.key or "none")
    status = run_agent(agent, target, options.arguments)
    return LaunchResult(agent=agent.name, model=model, status=status)


def _prefill_preamble(agent: Agent, remote: RemoteEndpoint, model: str) -> None:
    """Let the endpoint load the agent's cached system prompt now, not at the first request."""
    cwd = Path.cwd()
    is_repository = any((folder / ".git").exists() for folder in (cwd, *cwd.parents))
    body = {"agent": agent.name, "folder": str(cwd), "is_repository": is_repository}
    with contextlib.suppress(ServeError):
        remote.request("POST", f"/v1/models/{model}/recall", body)


def _describe_agent(agent: Agent) -> KnownAgent:
    return KnownAgent(
        name=agent.name,
        title=agent.title,
        path=shutil.which(agent.name) or "",
        install=agent.install,
        first_tokens=agent.first_tokens,
    )


def _find_endpoint(
    agent: Agent, options: argparse.Namespace, host: EngineHost
) -> tuple[RemoteEndpoint, str, int]:
    """Find or start an endpoint with a context large enough; return it, model and context (tokens)."""
    key = keys.own_key()
    remote, pid = endpoint.find(urls(host.config), key), 0
    if remote is not None:
        model = host.files(options.model).name if options.model else remote.model
    else:
        ref = resolve(options.model or host.config.default_model)
        model = host.files(ref).name
        if ref.pulled is not None and 0 < ref.pulled.n_ctx_train < agent.needs_tokens:
            raise _too_small(agent, model, ref.pulled.n_ctx_train)
        remote, pid = endpoint.start(serve_command(ref.text, host.config, options.n_ctx), key)
    n_ctx = remote.n_ctx(model)
    if n_ctx < agent.needs_tokens:
        if pid:
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
        raise _too_small(agent, model, n_ctx)
    if pid:
        _say_started(pid)
    return remote, model, n_ctx


def _say_started(pid: int) -> None:
    sys.stderr.write(
        f"started an endpoint, which ends after {IDLE_EXIT_S // 60} minutes without a request, "
        f"or with `edgeinfer stop {pid}`\n"
    )


def own_endpoint(options: argparse.Namespace, host: EngineHost) -> RemoteEndpoint:
    """Find this user's endpoint or start one. Raises ServeError and the errors of `host.files`."""
    key = keys.own_key()
    remote = endpoint.find(urls(host.config), key)
    if remote is None:
        ref = resolve(options.model or host.config.default_model)
        host.files(ref)  # raise the error here: the endpoint would only write it to its log
        remote, pid = endpoint.start(serve_command(ref.text, host.config), key)
        _say_started(pid)
    return remote


def urls(config: Config) -> Iterator[str]:
    """Yield the URLs at which endpoints with this data folder may listen.

    Endpoints with another data folder have other keys and conversations.
    """
    host, configured = config.serve.host, str(config.serve.port)
    endpoints = [run for run in processes(everywhere=True) if run.verb == "serve"]
    ports = {run.pid: _port(run, configured) for run in endpoints}
    own_ports = [ports[run.pid] for run in processes() if run.pid in ports]
    if configured in own_ports or configured not in ports.values():
        yield _url("127.0.0.1" if host in ("0.0.0.0", "::") else host, configured)
    for port in own_ports:
        yield _url("127.0.0.1", port)


def _port(launched: RunningLaunch, configured: str) -> str:
    flags = dict(zip(launched.arguments, launched.arguments[1:], strict=False))
    return flags.get("--port", configured)


def _url(host: str, port: str) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve_command(model: str, config: Config, n_ctx: int | None = None) -> list[str]:
    """Return a command that starts an endpoint, on a free port if the configured one is taken.

    `n_ctx` is the context (tokens); None leaves the configured one.
    """
    arguments = [*own_command(), "serve", model, "--log", "json"]
    arguments += ["--host", "127.0.0.1", "--idle-exit", str(IDLE_EXIT_S)]
    arguments += ["--port", str(free_port(config.serve.port))]
    return arguments + (["--ctx", str(n_ctx)] if n_ctx else [])


def own_command() -> list[str]:
    """Return the command that runs this program, in a form that `ps` and `stop` recognize."""
    shipped = program_file()
    if shipped is not None:
        return [str(shipped)]
    script = Path(sys.executable).with_name("edgeinfer")
    return [str(script)] if script.is_file() else [sys.executable, "-m", "edgeinfer"]


def free_port(port: int = 0) -> int:
    """Return `port` if it is free on 127.0.0.1, otherwise another free port."""
    import socket

    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", port))
        except OSError:
            trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]  # type: ignore[no-any-return]


def _too_small(agent: Agent, model: str, n_ctx: int) -> ServeError:
    rounded = 1 << (agent.needs_tokens - 1).bit_length()
    return ServeError(
        f"{model} has a context of {n_ctx:,} tokens, and {agent.title} needs {agent.needs_tokens:,} "
        f"(its first request has {agent.first_tokens:,})",
        hint=f"start it with a larger context: `edgeinfer serve {model} --ctx {rounded}`, or choose a "
        "model that was trained on more tokens: `edgeinfer list`",
    )
