"""`edgeinfer batch IN OUT`: answer a file of requests in OpenAI's batch format."""

from __future__ import annotations

import argparse

from edgeinfer.cli.options import add_launch_options, add_load_options, add_quiet
from edgeinfer.cli.parser import add_option
from edgeinfer.cli.result import Result
from edgeinfer.host import Host


class BatchResult(Result, frozen=True, kw_only=True):
    """`done` lines of this run, of which `failed` have a status of 400 or more; `skipped` were done.

    `left` lines have no answer yet: their failure, `left_reason`, may be temporary.
    """

    done: int
    failed: int
    skipped: int
    total: int
    seconds: float
    completion_tokens: int
    output: str
    left: int = 0
    left_reason: str = ""

    @property
    def exit_code(self) -> int:
        return 1 if self.failed or self.left else 0

    def human(self) -> str:
        rate = self.completion_tokens / self.seconds if self.seconds else 0.0
        counts = f"{self.done} done, {self.skipped} already there, {self.failed} failed"
        lines = [f"{counts}, of {self.total}: {self.output}"]
        if self.left:
            lines.append(f"{self.left} left ({self.left_reason}): the same command asks them again")
        lines.append(f"{self.completion_tokens} tokens in {self.seconds:.1f} s ({rate:.1f} tokens/s)")
        return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input", metavar="IN.jsonl", help="requests, one a line: custom_id, method, url, body"
    )
    parser.add_argument(
        "output",
        metavar="OUT.jsonl",
        help="answers, one a line; finished lines are skipped, so a run can be resumed",
    )
    add_option(
        parser, "--model MODEL", "model of requests that name none (default: the configured one)"
    )
    add_quiet(parser)
    add_load_options(parser)
    add_launch_options(parser)


def run(options: argparse.Namespace, host: Host) -> BatchResult:
    """Answer the requests that OUT has no answer for. Raises what `batching.batch` raises."""
    from edgeinfer.cli.batching import batch  # 240 ms: the server, which `--help` does not need

    return batch(options, host)
