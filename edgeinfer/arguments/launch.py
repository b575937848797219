"""`chat`, `run`, `serve`, `batch`: the verbs that need a model in memory, and the options they share."""

from __future__ import annotations

import argparse
import sys

from edgeinfer.host import Host
from edgeinfer.result import Result


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register this family's verbs."""
    _add_run(verbs)


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Options of load time: another value needs another snapshot. None means: the configuration decides."""
    load = parser.add_argument_group("load options (another value needs another snapshot)")
    load.add_argument("--ctx", type=int, metavar="TOKENS", help="context in tokens; 0 fits it to memory")
    load.add_argument("--parallel", type=int, metavar="N", help="sequences decoded at once")
    load.add_argument("--repack", choices=("auto", "on", "off"), help="repack weights for this CPU's fast paths")
    load.add_argument("--kv-type", choices=("f16", "q8_0", "q4_0"), help="type of the KV cache")
    load.add_argument("--gpu-layers", metavar="auto|none|N", help="layers offloaded to the GPU")


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """Options of launch time: they ride in the launch request, so any snapshot serves them."""
    launch = parser.add_argument_group("launch options")
    launch.add_argument("--threads", type=int, metavar="N", help="decode threads")
    launch.add_argument("--resume", choices=("auto", "always", "never"), help="resume from a snapshot")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Options of request time; None means: the model's defaults."""
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", "--temp", type=float, help="0 is greedy")
    sampling.add_argument("--top-k", type=int)
    sampling.add_argument("--top-p", type=float)
    sampling.add_argument("--min-p", type=float)
    sampling.add_argument("--typical-p", type=float)
    sampling.add_argument("--repeat-penalty", type=float)
    sampling.add_argument("--presence-penalty", type=float)
    sampling.add_argument("--frequency-penalty", type=float)
    sampling.add_argument("--dry-multiplier", type=float)
    sampling.add_argument("--mirostat", type=int, choices=(0, 1, 2))
    sampling.add_argument("--seed", type=int, help="the same seed gives the same answer")


def _add_run(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser("run", help="answer one prompt on stdout")
    parser.add_argument("model_or_prompt", nargs="?", metavar="MODEL", help="a model's name; left out: the default")
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; stdin is read too when it is piped")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="at most so many tokens")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a stream")
    parser.add_argument("--timings", action="store_true", help="timings on stderr")
    add_sampling_options(parser)
    add_load_options(parser)
    add_launch_options(parser)
    parser.set_defaults(command=_cmd_run)


def _cmd_run(options: argparse.Namespace, host: Host) -> Result:
    from edgeinfer.commands.run import run  # commands are imported when typed

    return run(options, host, stream_to=None if options.json else sys.stdout, talk=sys.stderr)
