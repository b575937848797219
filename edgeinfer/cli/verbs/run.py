"""`edgeinfer run`: answer one prompt on stdout."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import msgspec

from edgeinfer import typed_options
from edgeinfer.chat.attachments import read, with_attachments
from edgeinfer.cli import options as shared
from edgeinfer.cli.parser import add_option
from edgeinfer.cli.receipt_file import ReceiptFile
from edgeinfer.cli.result import Result
from edgeinfer.config.load_options import NO_DRAFT
from edgeinfer.errors import UnknownModelError, UsageError
from edgeinfer.host import EngineHost, ProcessStart
from edgeinfer.media import document_files
from edgeinfer.media.pictures import join_parts
from edgeinfer.platform.disk import path_errors
from edgeinfer.platform.process import SignalHandlers
from edgeinfer.receipts.receipt import load_key, make_receipt
from edgeinfer.runtime.event_stream import CollectedAnswer, RepetitionWatch
from edgeinfer.runtime.events import Finished, ReasoningDelta, TextDelta, Timings, Usage
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.runtime.requests import GenerateRequest, Message, with_answer_limit, with_options
from edgeinfer.safe_text import without_controls
from edgeinfer.server.tracing import Span, generation_spans, start_spans, write
from edgeinfer.tools.tool_use import ToolUse, call_messages, uses_of
from edgeinfer.units import format_ms

if TYPE_CHECKING:
    from edgeinfer.models.reference import ModelRef


class Startup(msgspec.Struct, frozen=True, kw_only=True):
    """Times (ms) of a start: `ready_ms` from exec until the model is ready, then `prefill_ms`.

    `ready_ms` is the sum of `start_ms` (of the process) and `load_ms` (of the model).
    """

    ready_ms: float
    start_ms: float
    load_ms: float
    prefill_ms: float


class RunResult(Result, frozen=True, kw_only=True):
    """The answer to a prompt. `human` returns "", because the text was printed while it streamed."""

    model: str
    text: str
    reasoning: str = ""
    finish_reason: str
    usage: Usage
    timings: Timings
    start: ProcessStart
    startup: Startup
    calls: tuple[ToolUse, ...] = ()

    @property
    def exit_code(self) -> int:
        return 130 if self.finish_reason == "cancelled" else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help = "model name or GGUF file (default: the configured one)"
    parser.add_argument("model_or_prompt", nargs="?", metavar="MODEL", help=help)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; stdin is appended")
    prompt_form = parser.add_mutually_exclusive_group()
    add_option(prompt_form, "--system TEXT|@FILE", shared.SYSTEM)
    add_option(prompt_form, "--raw", "send the prompt unchanged, without a chat template")
    add_option(parser, "--max-tokens N", shared.MAX_TOKENS, type=shared.count)
    add_option(parser, "--file FILE...", "attach a text, document, picture or folder")
    add_option(parser, "--image FILE...", "attach a picture, or the pages of a PDF as pictures")
    shape = parser.add_mutually_exclusive_group()
    add_option(shape, "--schema FILE|JSON", "answer in JSON that follows this schema")
    add_option(shape, "--grammar FILE|GBNF", "answer that follows this GBNF grammar")
    shared.add_think(parser)
    add_option(parser, "--tools", "let the model call the allowed tools")
    sampling = shared.add_sampling_options(parser)
    add_option(sampling, "--stop TEXT...", "stop before this text")
    shared.add_load_options(parser)
    launch = shared.add_launch_options(parser)
    add_option(launch, "--timings", "print timings on stderr")
    help = "write the answer's receipt, for `edgeinfer verify FILE`"
    add_option(launch, "--receipt FILE", help, type=ReceiptFile.parse)
    add_option(launch, "--private", "leave prompt and answer out of the receipt: FILE.content has them")
    shared.add_traces(launch)


def run(options: argparse.Namespace, host: EngineHost) -> RunResult:
    """Answer one prompt. Raises UsageError, and what `EngineHost.engine` and `Engine.submit` raise."""
    if options.private and not options.receipt:
        raise UsageError("--private needs --receipt FILE", hint="add it, or leave out --private")
    model, ref, prompt = _split_positionals(options.model_or_prompt, options.prompt, host)
    prompt, pictures = _read_prompt(_with_stdin(prompt), options)
    if options.tools and options.raw:
        message = "--raw sends the prompt unchanged, so it cannot offer tools"
        raise UsageError(message, hint="leave out --raw or --tools")
    answer_fields = typed_options.answer_fields(options)
    typed_sampling = typed_options.typed_sampling(options)
    system = options.system and typed_options.system_prompt(options.system, host.config)
    key = load_key(host.config.receipts.key) if options.receipt else None
    try:
        engine = host.engine(ref or model, typed_options.load_options(options, host.config.load))
    except UnknownModelError as error:
        listed = "`edgeinfer list` shows the models; a prompt of several words needs quotes"
        hint = error.hint or (listed if options.prompt else None)
        raise UnknownModelError(error.message, hint=hint) from error
    started = start_spans(host.start.stages_ms, host.start.how) if options.traces else []
    for warning in engine.info.warnings:
        sys.stderr.write(without_controls(f"warning: {warning}\n"))
    if options.think == "on" and not engine.info.can_think:
        sys.stderr.write(f"edgeinfer: {model} does not think: --think on changes nothing\n")
    system = engine.info.system_prompt if system is None else system
    request = GenerateRequest(
        prompt=prompt if options.raw else None,
        pictures=pictures if options.raw else (),
        messages=() if options.raw else _turns(system, prompt, pictures),
        sampling=with_options(engine.info.sampling, typed_sampling),
        max_tokens=options.max_tokens,
        **answer_fields,
    )
    if not options.tools:
        request = with_answer_limit(request, can_think=engine.info.can_think)
    if options.receipt:
        request = options.receipt.record(request, is_private=options.private)
    # purge deleted conversations in a daemon thread, for which the exit does not wait; the next run
    # continues an interrupted purge
    threading.Thread(target=_purge, name="edgeinfer-purge", daemon=True).start()
    stream_to = None if options.json else sys.stdout
    if options.tools:
        result, request, finished = _with_tools(engine, request, model, host, stream_to)
    else:
        result, finished = _generate(engine, request, model, host.start, stream_to)
    if result.finish_reason == "length" and options.max_tokens is None:
        limit = _describe_limit(result.usage, request.max_tokens, engine.info)
        sys.stderr.write(f"edgeinfer: {limit}\n")
    if options.receipt:
        receipt = make_receipt(request, finished, engine.info, key=key)
        options.receipt.write(receipt, is_private=options.private)
    if options.traces:
        _write_trace(options.traces, started, result)
    if options.timings:
        sys.stderr.write(f"{timings_line(result, engine.info)}\n")
    return result


def _read_prompt(text: str, options: argparse.Namespace) -> tuple[str, tuple[bytes, ...]]:
    """Return the prompt with attached texts, and the pictures. Raises UsageError without a prompt."""
    if not text.strip() and not options.file:
        hint = 'give one: `edgeinfer run "What is photosynthesis?"`, or pipe it in'
        raise UsageError("no prompt", hint=hint)
    if not (options.file or options.image):
        return text, ()
    attached = [read(Path(path)) for path in options.file]
    images = [image for path in options.image for image in document_files.pictures_in(Path(path))]
    images += [file.data for file in attached if file.is_picture]
    return join_parts([*images, with_attachments(text, attached)])


def _describe_limit(usage: Usage, limit: int | None, info: EngineInfo) -> str:
    """Describe the default limit that ended an answer, and the option that raises it."""
    if limit is not None and usage.completion_tokens >= limit:
        return f"stopped at {limit:,} tokens; more with --max-tokens N"
    n_tokens = usage.prompt_tokens + usage.completion_tokens
    if 0 < info.n_ctx_train <= info.n_ctx:
        return f"stopped: {n_tokens:,} tokens fill the context, and the model was trained on no more"
    return f"stopped: {n_tokens:,} tokens fill the context; more with --ctx TOKENS"


def _purge() -> None:
    from edgeinfer.chat.history.store import purge_deleted  # slow import: numpy takes 80 ms

    purge_deleted()


def _write_trace(path: str, start: list[Span], result: RunResult) -> None:
    """Write spans of the start and the last generation. Raises UsageError if that fails."""
    spans = start + generation_spans(start[-1].ended_s, result.timings)
    root = Span("run", start[0].began_s, spans[-1].ended_s)
    facts = {"gen_ai.request.model": result.model, "edgeinfer.how": result.start.how}
    with path_errors(path, "name another file for --traces"):
        write(path, root, spans, facts)


def _with_tools(
    engine: Engine, request: GenerateRequest, model: str, host: EngineHost, stream_to: TextIO | None
) -> tuple[RunResult, GenerateRequest, Finished]:
    """Answer and run tool calls until an answer calls no tool; report the calls on stderr."""
    from edgeinfer.tools.loop import ChatTools, NoFrontEnd

    front, rounds = NoFrontEnd(sys.stderr), list[tuple[ToolUse, ...]]()
    with contextlib.closing(ChatTools(host.config.tools, Path.cwd())) as tools:
        front.say(tools.prepare())
        while True:
            request = msgspec.structs.replace(request, **tools.fields(rounds))
            result, finished = _generate(engine, request, model, host.start, stream_to)
            if result.finish_reason != "tool_calls" or request.tool_choice.mode == "none":
                break
            run_calls = tools.start(result.calls, front, past=rounds)
            with _stopped_by_ctrl_c(tools.stop):
                uses = run_calls()
            rounds.append(uses)
            front.say(tools.notices())
            if any(use.status == "stopped" for use in uses):
                result = msgspec.structs.replace(result, finish_reason="cancelled")
                break
            turns = call_messages(result.text, result.reasoning, uses)
            request = msgspec.structs.replace(request, messages=(*request.messages, *turns))
    if front.refused:
        patterns = dict.fromkeys(front.refused)
        allow = ", ".join(msgspec.json.encode(pattern).decode() for pattern in patterns)
        front.say([f"refused; to allow such calls, add to `allow` under [tools]: {allow}"])
    calls = tuple(itertools.chain(*rounds))
    return msgspec.structs.replace(result, calls=calls), request, finished


def _turns(system: str, content: str, pictures: tuple[bytes, ...]) -> tuple[Message, ...]:
    question = Message(role="user", content=content, pictures=pictures)
    return (Message(role="system", content=system), question) if system else (question,)


def _split_positionals(
    first: str | None, second: str | None, host: EngineHost
) -> tuple[str, ModelRef | None, str]:
    """Return model, its reference (None if not resolved) and prompt ("" if it is piped).

    A single word is the model if one has this name, otherwise the prompt. Raises UnknownModelError if
    the word is probably a misspelt model, CatalogError if the model's record is damaged.
    """
    if first is None:
        return host.config.default_model, None, ""
    if second is not None:
        return first, None, second
    from edgeinfer.models.reference import find_unless_misspelt  # a resumed process seldom needs this

    ref = find_unless_misspelt(first, host.config.default_model)
    return (host.config.default_model, None, first) if ref is None else (first, ref, "")


def _with_stdin(prompt: str) -> str:
    if sys.stdin is None or sys.stdin.isatty():
        return prompt
    piped = typed_options.read_text(sys.stdin.buffer, "stdin", errors="replace")
    if "\0" in piped:
        hint = "pipe text, or attach a PDF, DOCX or picture: `--file FILE`"
        raise UsageError("stdin is a binary file", hint=hint)
    return f"{prompt}\n\n{piped}" if prompt and piped.strip() else prompt or piped


@contextlib.contextmanager
def _stopped_by_ctrl_c(stop: Callable[[], object]) -> Iterator[None]:
    """Call `stop` at the first Ctrl-C or SIGTERM, and at the end; a second signal ends the process."""

    def handle(number: int, _frame: object) -> None:
        stop()
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    with SignalHandlers({signal.SIGINT: handle, signal.SIGTERM: handle}):
        try:
            yield
        finally:
            stop()


def _generate(
    engine: Engine, request: GenerateRequest, model: str, start: ProcessStart, stream_to: TextIO | None
) -> tuple[RunResult, Finished]:
    """Generate an answer and write it while it streams. Raises what `Engine.submit` raises."""
    generation, answer = engine.submit(request), CollectedAnswer()
    watch, repeats = RepetitionWatch(), False
    is_terminal = stream_to is not None and stream_to.isatty()
    with _stopped_by_ctrl_c(generation.cancel):
        for event in generation:
            if isinstance(event, TextDelta | ReasoningDelta):
                if repeats:
                    continue  # this text was decoded before the cancellation
                n_kept = watch.add(event.text)
                if n_kept is not None:
                    repeats = True
                    generation.cancel()
                    event = msgspec.structs.replace(event, text=event.text[:n_kept])
            answer.add(event)
            if stream_to is not None and isinstance(event, TextDelta):
                stream_to.write(without_controls(event.text) if is_terminal else event.text)
                stream_to.flush()
    if stream_to is not None and (answer.text or not answer.calls):
        stream_to.write("\n")
        stream_to.flush()
    finished = answer.finish
    start_ms = start.stages_ms.get("load", start.ready_ms)
    if repeats:
        sys.stderr.write("edgeinfer: the answer repeated itself; stopped\n")
    result = RunResult(
        model=model,
        text=answer.text,
        reasoning=answer.reasoning,
        finish_reason="repetition" if repeats else finished.reason,
        usage=finished.usage,
        timings=finished.timings,
        start=start,
        startup=Startup(
            ready_ms=start.ready_ms,
            start_ms=start_ms,
            load_ms=round(start.ready_ms - start_ms, 1),
            prefill_ms=finished.timings.prefill_ms,
        ),
        calls=uses_of(answer) if finished.reason == "tool_calls" else (),
    )
    return result, finished


def timings_line(result: RunResult, info: EngineInfo) -> str:
    """Return a line with start, prompt, prefill, first token, tokens per second, and drafts."""
    usage, timings = result.usage, result.timings
    rate = timings.decode_tokens_per_s(usage.completion_tokens)
    took = result.startup
    drafts = ""
    if timings.draft_tokens:
        chosen = info.choices.get("draft")
        name = f" (draft model {chosen.value})" if chosen and chosen.value != NO_DRAFT else ""
        drafts = f"; drafts: {timings.draft_accepted_tokens}/{timings.draft_tokens} accepted{name}"
    parts = f"start {format_ms(took.start_ms)}, load {format_ms(took.load_ms)}"
    return (
        f"{result.model}: {result.start.how} in {format_ms(took.ready_ms)} ({parts}); "
        f"prompt {usage.prompt_tokens} tokens ({usage.cached_tokens} cached), "
        f"prefill {format_ms(took.prefill_ms)}; "
        f"first token {timings.ttft_ms:.0f} ms; "
        f"{usage.completion_tokens} tokens at {rate:.1f}/s{drafts}; "
        f"{result.finish_reason}; {timings.summary(usage.cached_tokens)}"
    )
