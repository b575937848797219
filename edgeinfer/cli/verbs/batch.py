"""`edgeinfer batch IN OUT`: answer a file of requests in OpenAI's batch format, offline.

Requests go to the routes of the HTTP endpoint, without sockets. An answer is appended to OUT as one
line, in one write, in the order of completion. A later run skips the answered `custom_id`s in OUT and
cuts off an incomplete last line, so nothing is lost or done twice after a kill. That run removes the
lines of failed requests and tries these requests again. A request that fails temporarily is retried
with growing pauses, then left to the next run without a line in OUT. OUT is locked. A pipe or a
character device as OUT is neither locked nor read.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import fcntl
import itertools
import os
import signal
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from edgeinfer.cli.options import add_launch_options, add_load_options, add_quiet
from edgeinfer.cli.parser import add_option
from edgeinfer.cli.result import Result
from edgeinfer.cli.terminal import StageProgress
from edgeinfer.errors import (
    DiskFullError,
    EdgeInferError,
    InterruptedByUser,
    ModelBusyError,
    UsageError,
)
from edgeinfer.host import EngineHost
from edgeinfer.platform.disk import new_file, path_errors, sync, try_lock
from edgeinfer.receipts.receipt import load_key
from edgeinfer.server import batches
from edgeinfer.server.batches import BatchLine
from edgeinfer.server.callers import OWN

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from edgeinfer.server.endpoint import Endpoint

#: The run ends after this many requests in a row failed temporarily: one request cannot be the cause.
_MOST_FAILURES_IN_A_ROW = 16
#: First byte of a line while it is being removed from the file OUT. No line of JSON begins with it.
_REMOVED = b"\x18"
#: First bytes of each line of the file OUT, without spaces.
_LINE_PREFIX = b'{"id":"batch_'


class BatchResult(Result, frozen=True, kw_only=True):
    """Numbers of requests: this run answered `done` requests, earlier runs answered `skipped` ones.

    Of those in `done`, `failed` got a status of 400 or more. `retried` had failed in an earlier run.
    `left` have no answer yet; `left_reason` is the last failure. `output` is the path of the output
    file; if the answers go to stdout, `output` is "", and stderr has the text of this result.
    """

    done: int
    failed: int
    skipped: int
    total: int
    seconds: float
    completion_tokens: int
    output: str
    retried: int = 0
    left: int = 0
    left_reason: str = ""

    @property
    def exit_code(self) -> int:
        return 1 if self.failed or self.left else 0

    def human(self) -> str:
        if not self.output:
            return ""
        rate = self.completion_tokens / self.seconds if self.seconds else 0.0
        n_answered = self.done - self.failed
        counts = f"{n_answered} done, {self.skipped} already there, {self.failed} failed"
        lines = [f"{counts}, of {self.total}: {self.output}"]
        if self.failed:
            lines.append("the line of a failed request has the reason: `response.body.error`")
        if self.retried:
            lines.append(f"{self.retried} had failed in an earlier run and were tried again")
        if self.left:
            lines.append(f"{self.left} left ({self.left_reason}): run the same command to retry them")
        lines.append(f"{self.completion_tokens} tokens in {self.seconds:.1f} s ({rate:.1f} tokens/s)")
        return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN.jsonl", help="lines of custom_id, method, url, body")
    help = "answers, one per line; a later run tries only failed and missing ones"
    parser.add_argument("output", metavar="OUT.jsonl", help=help)
    add_option(parser, "--model MODEL", "model of requests without one (default: the configured one)")
    add_option(parser, "--receipts", "add the receipt of each answer, for `edgeinfer verify OUT.jsonl`")
    add_quiet(parser)
    add_load_options(parser)
    add_launch_options(parser)


class _Answer(msgspec.Struct, frozen=True):
    """A line of OUT. OpenAI's own lines have a `response` of null after some failures."""

    custom_id: str
    response: dict[str, Any] | None = None


def run(options: argparse.Namespace, host: EngineHost) -> BatchResult:
    """Answer the requests that have no answer in the output file, or only a failed one.

    Raises UsageError, which names an invalid line, before anything is computed; ModelBusyError if
    another run has locked the output file.
    """
    paths = (options.input, options.output)
    if all(map(os.path.exists, paths)) and os.path.samefile(*paths):
        raise UsageError(f"{options.output} is both input and output", hint="name another output file")
    with path_errors(Path(options.input), "check the path"):
        lines = batches.read_lines(Path(options.input))
    if options.receipts:
        for line in lines:
            if line.url != "/v1/embeddings":
                line.body["receipt"] = True
    if any(line.body.get("receipt") for line in lines):
        load_key(host.config.receipts.key)  # fail before the first answer if the key is invalid
    return answer(options, host, lines, Path(options.output))


def answer(
    options: argparse.Namespace,
    host: EngineHost,
    lines: list[BatchLine],
    path: Path,
    models: Sequence[str] = (),
) -> BatchResult:
    """Append missing answers to `path`; requests may also name `models`. Raises what `run` raises."""
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(_open_output(path))
        is_result_elsewhere = _is_stdout(output)
        if is_result_elsewhere and options.json:
            hint = "write the answers to a file: `edgeinfer batch requests.jsonl answers.jsonl --json`"
            raise UsageError("--json needs stdout for its result, not for the answers", hint=hint)
        answers = read_output(output) if _is_file(output) else {}
        todo = [line for line in lines if answers.get(line.custom_id, True)]
        failed = {line.custom_id for line in todo} & answers.keys()
        if failed or None in answers:
            output = stack.enter_context(_without_lines(path, output, {None, *failed}))
        n_skipped, began_s = len(lines) - len(todo), time.perf_counter()
        tally = _Tally(total=len(lines), skipped=n_skipped, retried=len(failed))
        if todo:
            asyncio.run(_run(options, host, models, todo, output, tally))
    seconds, counts = time.perf_counter() - began_s, msgspec.structs.asdict(tally)
    result = BatchResult(**counts, left=tally.n_left, seconds=seconds, output=str(path))
    if is_result_elsewhere:
        sys.stderr.write(f"{result.human()}\n")
        return msgspec.structs.replace(result, output="")
    return result


def _is_file(output: int) -> bool:
    return stat.S_ISREG(os.fstat(output).st_mode)


def _is_stdout(output: int) -> bool:
    """Return whether OUT is the file or pipe to which results are printed."""
    return os.path.sameopenfile(output, 1) and not stat.S_ISCHR(os.fstat(output).st_mode)


def read_output(output: int) -> dict[str | None, bool]:
    """Return `custom_id` → whether the request failed, from the lines of the open file `output`.

    An incomplete last line is removed from the file. There is a key None if an earlier run was
    interrupted while it removed lines, so that their remains are still in the file.
    """
    whole, answers = 0, dict[str | None, bool]()
    for raw in _whole_lines(output):
        custom_id, has_failed = _decode(raw)
        answers[custom_id] = has_failed and answers.get(custom_id, True)
        whole += len(raw)
    unfinished = os.pread(output, 40, whole).replace(b" ", b"").lstrip(_REMOVED)
    if not _LINE_PREFIX.startswith(unfinished[: len(_LINE_PREFIX)]):
        problem = "the output file ends with a line that is not an answer"
        raise UsageError(problem, hint="name another output file")
    os.ftruncate(output, whole)
    return answers


def _decode(raw: bytes) -> tuple[str | None, bool]:
    """Return a line's `custom_id` (None if the line is being removed), and whether it is a failure."""
    if raw.startswith(_REMOVED) or (raw.startswith(b" ") and raw.isspace()):
        return None, True
    try:
        line = msgspec.json.decode(raw, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"the output file has a line that is not an answer: {error}"
        raise UsageError(message, hint="name another output file") from error
    return line.custom_id, line.response is None or (line.response.get("status_code") or 0) >= 400


def _whole_lines(output: int) -> Iterator[bytes]:
    with os.fdopen(os.dup(output), "rb") as file:
        file.seek(0)
        yield from itertools.takewhile(lambda raw: raw.endswith(b"\n"), file)


@contextlib.contextmanager
def _without_lines(path: Path, output: int, removed: set[str | None]) -> Iterator[int]:
    """Remove the lines of these requests from OUT; yield a locked descriptor of the remaining file.

    OUT is replaced by a copy. A file that cannot be replaced, e.g. a mounted one, is changed in place.
    """
    mode = stat.S_IMODE(os.fstat(output).st_mode)
    with contextlib.ExitStack() as stack:
        try:
            with new_file(path.resolve(), mode) as file:
                copy = os.dup(file.fileno())
                stack.callback(os.close, copy)
                fcntl.fcntl(copy, fcntl.F_SETFL, os.O_APPEND)
                try_lock(copy)
                file.writelines(raw for raw in _whole_lines(output) if _decode(raw)[0] not in removed)
                file.flush()
                os.fsync(copy)
        except OSError:
            stack.close()
            with path_errors(path, "name another output file"):
                _remove_in_place(output, removed)
            copy = output
        else:
            with contextlib.suppress(OSError):  # some folders cannot be opened, or flushed
                sync(path.resolve().parent)
        yield copy


def _remove_in_place(output: int, removed: set[str | None]) -> None:
    """Cut off these requests' lines at the end of OUT; overwrite earlier ones with spaces.

    The next line then begins with these spaces, as JSON allows. Line breaks are overwritten last: after
    a kill or a power failure, the next run finds each line whole, marked as removed, or blank.
    """
    n_read = n_left = 0
    lines = list[range]()
    for raw in _whole_lines(output):
        line = range(n_read, n_read := n_read + len(raw))
        if _decode(raw)[0] in removed:
            lines.append(line)
        else:
            n_left = n_read
    os.ftruncate(output, n_left)
    fcntl.fcntl(output, fcntl.F_SETFL, 0)  # with O_APPEND, pwrite would append
    for first, last, byte in ((0, 1, _REMOVED), (1, -1, b" "), (0, 1, b" "), (-1, None, b" ")):
        for span in (line[first:last] for line in lines if line.start < n_left):
            os.pwrite(output, byte * len(span), span.start)
        os.fsync(output)
    fcntl.fcntl(output, fcntl.F_SETFL, os.O_APPEND)


@contextlib.contextmanager
def _open_output(path: Path) -> Iterator[int]:
    """Open OUT and lock it. Pipes and character devices are only written to, without a lock.

    Raises UsageError for a block device, whose content the answers would overwrite.
    """
    if path.is_block_device():
        raise UsageError(f"{path} is a disk, not a file", hint="name another output file")
    is_stream = path.is_fifo() or path.is_char_device()
    access = os.O_WRONLY if is_stream else os.O_RDWR | os.O_CREAT
    with path_errors(path, "name another output file"):
        output = os.open(path, access | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        if not (is_stream or try_lock(output)):
            raise ModelBusyError(f"another command writes to {path}")
        yield output
    finally:
        os.close(output)


class _Tally(msgspec.Struct, kw_only=True):
    """Counts of this run so far, with the meanings of the fields of `BatchResult`."""

    total: int
    skipped: int
    retried: int
    done: int = 0
    failed: int = 0
    completion_tokens: int = 0
    left_reason: str = ""

    @property
    def n_left(self) -> int:
        return self.total - self.skipped - self.done

    def count(self, reply: batches.BatchReply) -> None:
        self.done += 1
        self.failed += reply.status >= 400
        self.completion_tokens += _completion_tokens(reply)


async def _run(
    options: argparse.Namespace,
    host: EngineHost,
    models: Sequence[str],
    todo: list[BatchLine],
    output: int,
    tally: _Tally,
) -> None:
    from edgeinfer.cli.endpoint_setup import offline_endpoint  # slow import: 240 ms

    endpoint, app = offline_endpoint(options, host, models)
    try:
        width = await _concurrency(endpoint)
        quiet = options.quiet or not sys.stderr.isatty()
        with StageProgress(sys.stderr, quiet=quiet) as progress:
            work = asyncio.ensure_future(_work(app, iter(todo), output, tally, width, progress))
            _stop_on_ctrl_c(work)
            try:
                await work
            except asyncio.CancelledError:
                raise InterruptedByUser("stopped; the same command continues from here") from None
    finally:
        if _is_file(output):
            os.fsync(output)
        endpoint.cancel_all()
        await endpoint.models.close()
        endpoint.threads.shutdown(wait=False, cancel_futures=True)


async def _concurrency(endpoint: Endpoint) -> int:
    """Return how many requests to send at once: more than the engine decodes, so it never idles."""
    lease = await endpoint.models.acquire(endpoint.models.default)
    try:
        return lease.engine.info.n_parallel + min(lease.engine.info.n_parallel, 16)
    finally:
        lease.release()


async def _work(
    app: ASGIApp,
    todo: Iterator[BatchLine],
    output: int,
    tally: _Tally,
    width: int,
    progress: StageProgress,
) -> None:
    left_in_a_row = 0

    async def worker() -> None:
        nonlocal left_in_a_row
        for line in todo:
            reply = await batches.post_with_retries(app, OWN, line)
            if batches.may_retry(reply):
                left_in_a_row += 1
                tally.left_reason = _reason(reply)
            else:
                _append(output, line, reply)
                left_in_a_row = 0
                tally.count(reply)
                progress.report("answering", tally.done / (tally.done + tally.n_left))
            if left_in_a_row >= _MOST_FAILURES_IN_A_ROW:
                return

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(width):
                group.create_task(worker())
    except ExceptionGroup as several:
        raise several.exceptions[0] from None


def _reason(reply: batches.BatchReply) -> str:
    error = msgspec.json.decode(reply.body).get("error") or {}
    return f"{reply.status} {error.get('code') or error.get('message') or ''}".rstrip()


def _append(output: int, line: BatchLine, reply: batches.BatchReply) -> None:
    """Append an answer as one line, in one write unless the disk is full."""
    unwritten = memoryview(batches.answer_line(line, reply))
    while unwritten:
        try:
            unwritten = unwritten[os.write(output, unwritten) :]
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFullError("no space left for answers; finished ones are kept") from error
            problem = f"the output file cannot be written: {error.strerror}"
            raise EdgeInferError(problem, hint="run the command again: it continues") from error


def _completion_tokens(reply: batches.BatchReply) -> int:
    if reply.status != 200:
        return 0
    usage = msgspec.json.decode(reply.body).get("usage") or {}
    return int(usage.get("completion_tokens", usage.get("output_tokens", 0)))


def _stop_on_ctrl_c(work: asyncio.Future[None]) -> None:
    with contextlib.suppress(ValueError, RuntimeError):  # only the main thread may set signal handlers
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, work.cancel)
