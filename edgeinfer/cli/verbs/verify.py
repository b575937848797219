"""`edgeinfer verify`: check receipts and saved replies, or a sample of a payload log."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import msgspec

from edgeinfer import typed_options
from edgeinfer.cli.options import add_attached_options, add_load_options
from edgeinfer.cli.parser import LAUNCH, add_option
from edgeinfer.cli.result import Result
from edgeinfer.cli.terminal import StageProgress
from edgeinfer.errors import EdgeInferError, ReceiptError, UsageError
from edgeinfer.host import EngineHost
from edgeinfer.platform.disk import open_regular, path_errors
from edgeinfer.platform.paths import is_model_path
from edgeinfer.receipts.receipt import MAX_BYTES, Receipt, parse_json, to_receipt
from edgeinfer.receipts.replies import Entry, as_type, find_receipts, read_replies
from edgeinfer.receipts.verify import ReceiptCheck, Verification
from edgeinfer.runtime.interface import Engine
from edgeinfer.safe_text import escape_hidden
from edgeinfer.units import format_ms

#: At most this many checks of receipts are listed, or as many as there are files if that is more. If
#: there are more checks, only failed ones are listed.
_MOST_NAMED = 20
#: Exit status of each verdict, from the best to the worst; "" if no receipt was checked.
_STATUSES = {"": 10, "verified": 0, "within tolerance": 9, "not checked": 5, "differs": 1}
#: Descriptions of answers that did not end by themselves.
_CUT = {"cancelled": "that was cancelled", "deadline": "that reached its deadline"}
_LACKS_TEXT = "the tokens in the receipt were compared, but not the whole text of the response"
_UNSIGNED = "not signed: anyone can make such a receipt, so it does not show who answered, or when"


class Check(Verification, frozen=True, kw_only=True):
    """The verification of a receipt in a file; `source` is the file and line.

    `lacks_text`: the response's text is missing, or not all of it was compared.
    """

    source: str
    lacks_text: bool = False

    @property
    def notes(self) -> list[str]:
        """Statements about what the verdict does not show."""
        is_unsigned = self.verdict in ("verified", "within tolerance") and not self.signer
        return [_LACKS_TEXT] * self.lacks_text + [_UNSIGNED] * is_unsigned


class VerifyResult(Result, frozen=True, kw_only=True):
    """Result of `verify`. `checks`: a random sample of `n_receipts` receipts, and failures to read one.

    `without_receipt` is the number of answers in a payload log that have no receipt. `notes` name the
    unfinished last lines of a payload log's files; these lines are not answers.
    """

    checks: Sequence[Check]
    n_receipts: int
    without_receipt: int = 0
    notes: Sequence[str] = ()

    @property
    def exit_code(self) -> int:
        """Exit status of the worst verdict."""
        verdicts = ["within tolerance" if c.lacks_text else c.verdict for c in self.checks]
        return _STATUSES[max(verdicts, key=[*_STATUSES].index, default="")]

    def human(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        n = self.without_receipt
        has_none = f"{'answer has' if n == 1 else 'answers have'} no receipt"
        yield from map(escape_hidden, self.notes)
        if not self.checks:
            yield f"nothing was checked: {f'{n} {has_none}' if n else 'the log is empty'}"
        elif self.n_receipts == len(self.checks) == 1:
            yield from [*describe(self.checks[0]), *self.checks[0].notes]
        else:
            yield from map(escape_hidden, self._summary())
        if n and self.checks:
            yield f"{n} more {has_none}"

    def _summary(self) -> Iterator[str]:
        files = {check.source.rpartition(":")[0] or check.source for check in self.checks}
        most = max(_MOST_NAMED, len(files))
        named = [check for check in self.checks if check.reason or len(self.checks) <= most]
        for check in named[:most]:
            yield f"{check.source}: {next(describe(check))}"
        if len(named) > most:
            yield f"and {len(named) - most} more"
        n_of = Counter[str](check.verdict for check in self.checks)
        counts = ", ".join(f"{n_of[verdict]} {verdict}" for verdict in _STATUSES if verdict in n_of)
        n_checked = len(self.checks) - n_of["not checked"]
        yield f"checked {n_checked} of {self.n_receipts} receipts: {counts}"
        notes = [note for check in self.checks for note in check.notes]
        notes += [f"signed by {check.signer}" for check in self.checks if check.signer]
        for note, n in Counter(notes).items():
            yield f"{n} of them: {note}"


def describe(result: Verification) -> Iterator[str]:
    """Yield lines that describe the verdict, with its reason and the first token that differs."""
    tokens = f"{result.n_answer} tokens"
    if cut := _CUT.get(result.finish_reason or ""):
        tokens = f"the first {tokens} of an answer {cut},"
    yield f"{result.verdict}: {result.reason or f'{tokens} of {result.model}'}"
    if result.signer:
        yield f"signed by {result.signer}"
    if result.position is not None:
        yield f"  receipt: {result.expected or '(end)'}"
        yield f"  engine:  {result.chosen or '(end)'}"
    if result.own_revision != result.kernel_revision:
        revisions = f"{result.kernel_revision}, and this program has {result.own_revision}"
        yield f"the receipt is of kernel revision {revisions}: only log-probabilities were compared"
    if result.mean_difference is not None:
        most = f"at most {result.most_difference:.3f}"
        yield f"log-probabilities differ by {result.mean_difference:.3f} on average, {most}"
    times = (format_ms(result.seconds * 1000), format_ms(result.generation_seconds * 1000))
    yield f"checked in {times[0]}; generation took {times[1]}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help = "receipts, or replies that have one: JSON, lines of JSON, a stream (- reads stdin)"
    parser.add_argument("files", nargs="*", metavar="FILE", help=help)
    add_option(parser, "--model MODEL", "model to check with (default: the receipt's)")
    add_option(parser, "--content FILE", "content of a private receipt")
    add_option(parser, "--log FOLDER", "check the answers of a payload log (`serve --log-payloads`)")
    add_option(parser, "--sample PERCENT", "share of the receipts to check", type=_share, default=1.0)
    add_load_options(parser)
    add_attached_options(parser.add_argument_group(LAUNCH))


def _share(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (percent := float(text.removesuffix("%"))) <= 100:
            return percent / 100
    raise argparse.ArgumentTypeError(f"{text!r} is not a percentage above 0 and up to 100, such as 1%")


def run(options: argparse.Namespace, host: EngineHost) -> VerifyResult:
    """Check receipts; exit status 0 if all answers verify. Raises UsageError, ReceiptError."""
    if bool(options.files) == (options.log is not None):
        problem = "FILE and --log cannot be combined" if options.files else "there is nothing to verify"
        raise UsageError(problem, hint="name a receipt, or a payload log with `--log FOLDER`")
    if options.content and options.log:
        problem = "--content is for a private receipt, which a payload log does not have"
        raise UsageError(problem, hint="leave out --content, or name the receipt instead of --log")
    checks = list[Check]()
    sample, spare = list[Entry](), list[Entry]()
    notes = list[str]()
    n_receipts = n_without = 0
    for answer in _read_answers(options, notes):
        if isinstance(answer, Check):
            checks.append(answer)
        elif answer is None:
            n_without += 1
        else:
            n_receipts += 1
            if random.random() < options.sample:
                sample.append(answer)
            if not random.randrange(n_receipts):  # a random receipt, if `sample` stays empty
                spare = [answer]
    checks += _check_all(sample or spare, options, host, may_raise=n_receipts == 1 and not checks)
    return VerifyResult(checks=checks, n_receipts=n_receipts, without_receipt=n_without, notes=notes)


def _read_answers(options: argparse.Namespace, notes: list[str]) -> Iterator[Entry | Check | None]:
    """Yield the receipt of each answer, or a failed check; None for an answer of a log without one.

    `notes` gets unfinished lines of logs. Raises UsageError, ReceiptError if the only file is invalid.
    """
    opener = open_regular if options.log else None  # a log has no FIFO, but a given file may be one
    for path in options.files or _log_files(options.log):
        has_none, without = not options.log, list[Check | None]()
        descriptor = os.dup(0) if path == "-" else path
        try:
            with path_errors(path, "check the path"), open(descriptor, "rb", opener=opener) as file:
                for source, documents in read_replies(file, "stdin" if path == "-" else path):
                    if not isinstance(documents, ReceiptError):
                        entries, n_answers = find_receipts(documents, source)
                        reason = "an answer has no receipt"
                        missing = Check(source=source, verdict="not checked", reason=reason)
                        without += [None if options.log else missing] * (n_answers - len(entries))
                        yield from entries
                        has_none &= not entries
                    elif options.log and _is_unfinished(file):
                        notes.append(f"{source}: the last line is unfinished, as after a crash")
                    else:
                        yield Check(source=source, verdict="not checked", reason=documents.message)
                        has_none = False
            if has_none:
                raise ReceiptError(f"{path} contains no receipt")
            yield from without
        except (UsageError, ReceiptError) as error:
            if len(options.files) == 1:
                raise
            reason = error.message.removeprefix(f"{path}: ")
            yield Check(source=path, verdict="not checked", reason=reason)


def _log_files(folder: str) -> list[str]:
    with path_errors(folder, "name a folder that `edgeinfer serve --log-payloads FOLDER` writes"):
        names = [name for name in sorted(os.listdir(folder)) if name.endswith(".jsonl")]
    return [os.path.join(folder, name) for name in names]


def _is_unfinished(file: BinaryIO) -> bool:
    """Return whether the line that was read last is the file's last one and lacks its line break."""
    ending = os.pread(file.fileno(), 2, file.tell() - 1)
    return len(ending) == 1 and ending != b"\n"


def _with_content(receipt: Receipt, path: str) -> Receipt:
    """Return a private receipt with the content in a file. Raises UsageError, ReceiptError."""
    with path_errors(path, "check the path"), open(path, "rb") as file:
        whole = to_receipt(parse_json(file.read(MAX_BYTES + 1)))
    if whole.content is None or whole.content_sha256 != receipt.content_sha256:
        problem = "it has no content" if whole.content is None else "its content has another digest"
        hint = "name the RECEIPT.content that was written with this receipt: `--content FILE`"
        raise ReceiptError(f"{path} does not belong to the receipt: {problem}", hint=hint)
    return msgspec.structs.replace(receipt, content=whole.content)


def _load(receipt: Receipt, options: argparse.Namespace, host: EngineHost) -> Engine:
    scheme, slash, _ = receipt.model.partition("/")
    is_address = is_model_path(receipt.model) or (slash and ":" in scheme)
    if is_address and not options.model:  # foreign receipts must not open files or fetch models
        problem = f"the receipt names its model by an address, {receipt.model!r}, which is never opened"
        raise ReceiptError(problem, hint="name the model to check with: `--model MODEL`")
    load = typed_options.load_options(options, host.config.load)
    load = msgspec.structs.replace(load, kv_type=options.kv_type or receipt.kv_type, is_counted=False)
    return host.engine(options.model or receipt.model, load)


def _check_all(
    sample: list[Entry], options: argparse.Namespace, host: EngineHost, *, may_raise: bool
) -> Iterator[Check]:
    """Check a sample by model. An error makes a receipt "not checked", or is raised if `may_raise`."""
    for _, group in itertools.groupby(sorted(sample, key=_load_key), key=_load_key):
        entries = list(group)
        with contextlib.ExitStack() as loaded:
            progress = loaded.enter_context(StageProgress(sys.stderr, quiet=not sys.stderr.isatty()))
            engine: Engine | None = None
            for i, entry in enumerate(entries):
                try:
                    receipt = to_receipt(entry.document)
                    if options.content:
                        receipt = _with_content(receipt, options.content)
                    if engine is None:
                        engine = loaded.enter_context(contextlib.closing(_load(receipt, options, host)))
                    progress.report("checking", i / len(entries) or None)
                    check = ReceiptCheck(receipt, engine, entry.quotes)
                    fields = msgspec.structs.asdict(check.run()) | {"lacks_text": check.lacks_text}
                except EdgeInferError as error:
                    if may_raise:
                        raise
                    fields = {"verdict": "not checked", "reason": error.message}
                yield Check(source=entry.source, **fields)


def _load_key(entry: Entry) -> list[str]:
    return [as_type(str, as_type(dict, entry.document).get(key)) for key in ("model", "kv_type")]
