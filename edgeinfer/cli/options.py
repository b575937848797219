"""`chat`, `run`, `serve`, `launch`, `batch`: the verbs that need a model, and what they share."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import Any

from edgeinfer.agents.table import AGENTS
from edgeinfer.cli.parser import (
    ENDPOINT,
    LAUNCH,
    LOAD,
    SAMPLING,
    HelpAll,
    Verbs,
    add_model,
    add_quiet,
    add_verb,
)
from edgeinfer.config import sampling_options
from edgeinfer.config.config_file import replica_range
from edgeinfer.config.load_options import LOAD_OPTIONS, N_CTX, LoadOption
from edgeinfer.config.sampling_options import SamplingOption

#: What `--system` takes wherever it stands.
SYSTEM = "system prompt: a text, @FILE, or a saved one's name"


def add(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Register this family's verbs."""
    _add_chat(verbs)
    _add_run(verbs)
    _add_serve(verbs)
    _add_launch(verbs)
    _add_batch(verbs)


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of load time; None means that the configuration decides."""
    parser.add_argument("--help-all", action=HelpAll, nargs=0, help="this help with every option")
    group = parser.add_argument_group(LOAD)
    for option in LOAD_OPTIONS:
        if option.flag and option.of_snapshot:
            add_load_option(group, option)


def add_attached_options(parser: argparse._ActionsContainer) -> None:
    """Add the rows of the table that any snapshot serves."""
    for option in LOAD_OPTIONS:
        if option.flag and not option.of_snapshot:
            add_load_option(parser, option)


def add_load_option(parser: argparse._ActionsContainer, option: LoadOption) -> None:
    """A row of the table as an argument; its value stands under the field's name."""

    choices = option.words if option.metavar is None else None
    parser.add_argument(
        option.flag,
        action=_Join if option.many else "store",
        dest=option.field,
        type=_parser_of(option),
        choices=choices,
        metavar=option.metavar,
        help=option.help,
    )


def _parser_of(option: LoadOption | SamplingOption) -> Callable[[str], Any]:

    def parse(text: str) -> Any:
        try:
            return option.parse(text)
        except ValueError:
            number = "a number " if isinstance(option, SamplingOption) else ""
            raise argparse.ArgumentTypeError(f"{text!r} is not {number}{option.allowed()}") from None

    return parse


class _Join(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, f"{before},{values}" if before else values)


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """Options of launch time: they ride in the launch request, so any snapshot serves them."""
    group = parser.add_argument_group(LAUNCH)
    add_attached_options(group)
    which = group.add_mutually_exclusive_group()
    which.add_argument(
        "--resume", choices=("auto", "always", "never"), help="whether to resume from a snapshot"
    )
    which.add_argument(
        "--snapshot",
        metavar="SNAPSHOT",
        help="resume this snapshot, with the model and load options it was made with",
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Options of request time; None means: the model's defaults."""
    group = parser.add_argument_group(SAMPLING)
    for option in sampling_options.TYPED:
        flags = (option.flag, "--temp") if option.field == "temperature" else (option.flag,)
        metavar = "N" if option.kind is int else "X"
        group.add_argument(*flags, type=_parser_of(option), metavar=metavar, help=option.help)


def _add_chat(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs,
        "chat",
        "chat:chat",
        "chat in the terminal; what `edgeinfer` alone does",
        "chat qwen3-4b",
        "chat --continue",
        json=False,
    )
    add_model(parser)
    parser.add_argument(
        "--continue", dest="continue_last", action="store_true", help="continue the last conversation"
    )
    parser.add_argument(
        "--plain", action="store_true", help="line by line, for screen readers and dumb terminals"
    )
    parser.add_argument("--system", metavar="TEXT|@FILE", help=SYSTEM)
    parser.add_argument("--max-tokens", type=int, metavar="N", help="at most N tokens per answer")
    add_sampling_options(parser)
    add_load_options(parser)
    add_launch_options(parser)


def _add_run(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs,
        "run",
        "run:run",
        "answer one prompt on stdout",
        'run qwen3-4b --max-tokens 50 "Summarise this." < notes.txt',
    )
    parser.add_argument(
        "model_or_prompt",
        nargs="?",
        metavar="MODEL",
        help="model name or GGUF file (default: the configured one)",
    )
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="the prompt; stdin is read too when it is piped"
    )
    told = parser.add_mutually_exclusive_group()
    told.add_argument("--system", metavar="TEXT|@FILE", help=SYSTEM)
    told.add_argument(
        "--raw", action="store_true", help="send the prompt unchanged, without a chat template"
    )
    parser.add_argument("--max-tokens", type=count, metavar="N", help="at most N tokens")
    parser.add_argument(
        "--file", action="append", default=[], metavar="FILE", help="a text file, put before the prompt"
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--schema", metavar="FILE|JSON", help="answer in JSON of this schema")
    shape.add_argument("--grammar", metavar="FILE|GBNF", help="answer by this grammar in GBNF")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end at this text")
    parser.add_argument("--think", choices=("on", "off"), help="reason first, if the model can")
    parser.add_argument("--image", help=argparse.SUPPRESS)  # refused: no model here reads images
    parser.add_argument("--timings", action="store_true", help="timings on stderr")
    add_sampling_options(parser)
    add_load_options(parser)
    add_launch_options(parser)


def _add_serve(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs,
        "serve",
        "serve:serve",
        "answer OpenAI, Anthropic, Ollama and plain HTTP clients",
        "serve qwen3-4b --port 8080",
        json=False,
    )
    add_model(parser, "model of requests that name none (default: the configured one)")
    add_endpoint_options(parser)
    add_load_options(parser)
    add_launch_options(parser)


def add_endpoint_options(parser: argparse.ArgumentParser) -> None:
    """Add the endpoint's options, all of launch time; None: the configuration or a default."""
    where = parser.add_argument_group(ENDPOINT)
    where.add_argument(
        "--host", metavar="ADDRESS", help="address to bind; one beyond loopback needs an API key"
    )
    where.add_argument("--port", type=port_number, metavar="N", help="port to bind; 0 takes a free one")
    where.add_argument(
        "--ollama",
        action="store_true",
        default=None,
        help="also listen at Ollama's place, 127.0.0.1:11434, and let its clients change the models",
    )
    where.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="API keys, one a line, the first one an administrator's; also EDGEINFER_API_KEY",
    )
    where.add_argument(
        "--any-user",
        action="store_true",
        default=None,
        help="without an API key: answer every user of this machine, not the own one alone",
    )
    where.add_argument(
        "--allow-host",
        action="append",
        metavar="NAME",
        help="also accept this Host header; .NAME accepts every name that ends so",
    )
    where.add_argument(
        "--allow-origin", action="append", metavar="ORIGIN", help="a web page's origin that may call"
    )
    where.add_argument("--tls-cert", metavar="FILE", help="certificate chain in PEM; with --tls-key")
    where.add_argument("--tls-key", metavar="FILE", help="private key in PEM")
    where.add_argument(
        "--keep-alive",
        type=keep_alive_s,
        metavar="S",
        help="seconds an idle model stays loaded; 0 unloads at once, -1 never",
    )
    where.add_argument(
        "--idle-exit",
        type=positive_s,
        metavar="S",
        help="exit after this many seconds without a request",
    )
    where.add_argument(
        "--replicas",
        type=_replicas,
        metavar="N|MIN..MAX",
        help="replicas of the model, each in its own process; as many of a range as requests need",
    )
    where.add_argument("--copies", dest="replicas", type=_replicas, help=argparse.SUPPRESS)
    where.add_argument(
        "--drain", type=positive_s, metavar="S", help="seconds that running requests have after SIGTERM"
    )
    for flag, limited in (
        ("--max-queue", "requests that may wait; beyond it the answer is 503"),
        ("--max-requests", "requests run at once, over all models"),
        ("--max-per-key", "requests run at once for one API key"),
        ("--max-body-mib", "largest request body"),
    ):
        where.add_argument(flag, type=count, metavar="N", help=limited)
    where.add_argument(
        "--unknown-fields",
        choices=("ignore", "refuse"),
        help="request fields this endpoint does not know; ignored ones are named in a header",
    )
    where.add_argument(
        "--log",
        choices=("json", "text", "off"),
        help="log lines on stderr (default: text on a terminal)",
    )
    where.add_argument(
        "--payload-log", metavar="FILE", help="write requests and answers to FILE (rotated, 0600)"
    )
    where.add_argument(
        "--redact", action="store_true", help="with --payload-log: lengths instead of texts"
    )


def _add_launch(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs,
        "launch",
        "launch:launch",
        "run a coding agent (claude, codex, …) on a model of this machine",
        "launch codex",
        "launch --model qwen3-4b claude --resume",
    )
    parser.add_argument("--list", action="store_true", help="list the agents that can be launched")
    parser.add_argument("--model", metavar="MODEL", help="the model (default: the endpoint's)")
    add_load_option(parser, N_CTX)
    parser.add_argument(
        "--anyway", action="store_true", help="even if the context is smaller than the agent needs"
    )
    parser.add_argument(
        "agent", nargs="?", choices=tuple(AGENTS), metavar="AGENT", help=", ".join(AGENTS)
    )
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="ARGS",
        help="arguments passed to the agent unchanged",
    )


def _add_batch(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs,
        "batch",
        "batch:batch",
        "answer a file of requests in OpenAI's batch format",
        "batch requests.jsonl answers.jsonl",
    )
    parser.add_argument(
        "input", metavar="IN.jsonl", help="requests, one a line: custom_id, method, url, body"
    )
    parser.add_argument(
        "output",
        metavar="OUT.jsonl",
        help="answers, one a line; finished lines are skipped, so a run can be resumed",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="model of requests that name none (default: the configured one)",
    )
    parser.add_argument(
        "--concurrency",
        type=count,
        metavar="N",
        help="requests run at once (default: chosen automatically)",
    )
    add_quiet(parser)
    add_load_options(parser)
    add_launch_options(parser)


def _replicas(text: str) -> str:
    try:
        replica_range(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _ranged(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], Any]:

    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if low <= kind(text) <= high:
                return kind(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a number between {low:,} and {high:,}")

    return parse


port_number = _ranged(int, 0, 65_535)
count = _ranged(int, 1, 1_000_000)
#: Up to a year.
positive_s = _ranged(float, 0.001, 31_536_000)


def keep_alive_s(text: str) -> float:
    """Parse 0, -1, or up to a year, in seconds. Raises argparse.ArgumentTypeError."""
    return float(text) if text in ("-1", "0") else float(positive_s(text))
