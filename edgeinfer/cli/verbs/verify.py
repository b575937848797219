"""`edgeinfer verify`: check receipts and saved replies, or a sample of a payload log."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from edgeinfer import typed_options
from edgeinfer.cli.options import add_attached_options, add_load_options
from edgeinfer.cli.parser import LAUNCH, add_option
from edgeinfer.cli.result import Result
from edgeinfer.errors import EdgeInferError, ReceiptError, UsageError
from edgeinfer.host import EngineHost
from edgeinfer.platform.disk import open_regular, path_errors
from edgeinfer.platform.paths import is_model_path
from edgeinfer.receipts.receipt import Receipt, parse_json, to_receipt
from edgeinfer.receipts.replies import RECEIPT_HINT, Entry, as_type, find_receipts, read_replies
from edgeinfer.receipts.verify import ReceiptCheck, TokenChoice, Verification, with_content
from edgeinfer.runtime.interface import Engine
from edgeinfer.safe_text import escape_hidden
from edgeinfer.units import format_ms

#: Maximum number of receipts of a sample that are named because they differ or were refused.
_MOST_NAMED = 20
#: Exit status of each verdict, from the best to the worst; "" if no receipt was checked.
_STATUSES = {"": 10, "verified": 0, "within tolerance": 9, "not checked": 5, "differs": 1}
#: Descriptions of answers that did not end by themselves.
_CUT = {"cancelled": "that was cancelled", "deadline": "that reached its deadline"}
#: Notes on what a verdict does not show.
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
    """The checks of a sample of `n_receipts`; `without_receipt` counts answers that have none.

    `notes` name unfinished lines of a payload log, which do not count.
    """

    checks: tuple[Check, ...]
    n_receipts: int
    without_receipt: int = 0
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """Exit status of the worst verdict."""
        worst = max((check.verdict for check in self.checks), key=[*_STATUSES].index, default="")
        return _STATUSES[worst]

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
        suspects = [check for check in self.checks if check.reason]
        for check in suspects[:_MOST_NAMED]:
            yield f"{check.source}: {check.verdict}: {check.reason}"
        if len(suspects) > _MOST_NAMED:
            yield f"and {len(suspects) - _MOST_NAMED} more"
        n_of = Counter[str](check.verdict for check in self.checks)
        counts = ", ".join(f"{n_of[verdict]} {verdict}" for verdict in _STATUSES if verdict in n_of)
        n_checked = len(self.checks) - n_of["not checked"]
        yield f"checked {n_checked} of {self.n_receipts} receipts: {counts}"
        for note, n in Counter(note for check in self.checks for note in check.notes).items():
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
        yield f"  receipt: {_token(result.expected)}"
        yield f"  engine:  {_token(result.chosen)}"
    if result.own_revision != result.kernel_revision:
        revisions = f"{result.kernel_revision}, and this program has {result.own_revision}"
        yield f"the receipt is of kernel revision {revisions}: only log-probabilities were compared"
    if result.mean_difference is not None:
        most = f"at most {result.most_difference:.3f}"
        yield f"log-probabilities differ by {result.mean_difference:.3f} on average, {most}"
    times = (format_ms(result.seconds * 1000), format_ms(result.generation_seconds * 1000))
    yield f"checked in {times[0]}; generation took {times[1]}"


def _token(choice: TokenChoice | None) -> str:
    if choice is None:
        return "(end)"
    logprob = "forced" if choice.logprob is None else f"log-probability {choice.logprob:.3f}"
    return f"{choice.text!r} (token {choice.id}, {logprob})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help = "receipt, or replies that have one: JSON, lines of JSON, a stream (- reads stdin)"
    parser.add_argument("receipt", nargs="?", metavar="FILE", help=help)
    add_option(parser, "--model MODEL", "model to check with (default: the receipt's)")
    add_option(parser, "--content FILE", "content of a private receipt")
    add_option(parser, "--log FOLDER", "check the answers of a payload log (`serve --log-payloads`)")
    add_option(parser, "--sample PERCENT", "share of the receipts to check", type=_share, default=1.0)
    add_load_options(parser)
    add_attached_options(parser.add_argument_group(LAUNCH))


def _share(text: str) -> float:
    with contextlib.suppress(ValueError):
        share = float(text.removesuffix("%")) / 100
        if 0 < share <= 1:
            return share
    raise argparse.ArgumentTypeError(f"{text!r} is not a percentage above 0 and up to 100, such as 1%")


def run(options: argparse.Namespace, host: EngineHost) -> VerifyResult:
    """Check receipts; exit status 0 if all answers verify. Raises UsageError, ReceiptError."""
    if (options.receipt is None) == (options.log is None):
        raise UsageError("give a receipt, or a payload log with --log", hint="edgeinfer verify --help")
    checks = list[Check]()
    sample, spare = list[Entry](), list[Entry]()
    notes = list[str]()
    n_receipts = n_without = 0
    for source, documents in _replies(options, notes):
        if isinstance(documents, ReceiptError):
            checks.append(Check(source=source, verdict="not checked", reason=documents.message))
            continue
        entries, n_answers = find_receipts(documents, source)
        n_without += n_answers - len(entries)
        for entry in entries:
            n_receipts += 1
            if random.random() < options.sample:
                sample.append(entry)
            if not random.randrange(n_receipts):  # a random receipt, if `sample` stays empty
                spare = [entry]
    if options.receipt and not n_receipts and not checks:
        raise ReceiptError(f"{options.receipt} contains no receipt", hint=RECEIPT_HINT)
    checks += _check_all(sample or spare, options, host, may_raise=n_receipts == 1 and not checks)
    return VerifyResult(
        checks=tuple(checks), n_receipts=n_receipts, without_receipt=n_without, notes=tuple(notes)
    )


def _replies(
    options: argparse.Namespace, notes: list[str]
) -> Iterator[tuple[str, list[Any] | ReceiptError]]:
    """Yield the replies of a file, of stdin or of a payload log. Raises UsageError, ReceiptError.

    `notes` gets a log's unfinished last lines; unreadable files of a log are yielded as errors.
    """
    if options.receipt == "-":
        yield from read_replies(sys.stdin.buffer, "stdin")
        return
    if options.receipt:
        with path_errors(options.receipt, "check the path"), open(options.receipt, "rb") as file:
            yield from read_replies(file, str(Path(options.receipt)))
        return
    with path_errors(options.log, "name a folder that `edgeinfer serve --log-payloads FOLDER` writes"):
        names = sorted(os.listdir(options.log))
    for path in (Path(options.log, name) for name in names if name.endswith(".jsonl")):
        try:
            with open(open_regular(path), "rb") as file:
                for source, documents in read_replies(file, str(path)):
                    if isinstance(documents, ReceiptError) and _is_unfinished(file):
                        notes.append(f"{source}: the last line is unfinished, as after a crash")
                    else:
                        yield source, documents
        except OSError as error:
            yield str(path), ReceiptError(error.strerror or str(error))


def _is_unfinished(file: BinaryIO) -> bool:
    """Return whether the line that was read last is the file's last one and lacks its line break."""
    ending = os.pread(file.fileno(), 2, file.tell() - 1)
    return len(ending) == 1 and ending != b"\n"


def _read(document: Any, content: str | None) -> Receipt:
    receipt = to_receipt(document)
    if content is None:
        return receipt
    with path_errors(content, "check the path"):
        return with_content(receipt, to_receipt(parse_json(Path(content).read_bytes())))


def _load(receipt: Receipt, options: argparse.Namespace, host: EngineHost) -> Engine:
    name = options.model or receipt.model
    if not options.model and is_model_path(name):  # foreign receipts must not open files
        problem = f"the receipt names its model by a path, {name!r}, which is never opened"
        raise ReceiptError(problem, hint="name the model to check with: `--model MODEL`")
    load = typed_options.load_options(options, host.config.load)
    kv_type = options.kv_type or receipt.kv_type
    return host.engine(name, msgspec.structs.replace(load, kv_type=kv_type, is_counted=False))


def _check_all(
    sample: list[Entry], options: argparse.Namespace, host: EngineHost, *, may_raise: bool
) -> Iterator[Check]:
    """Check a sample by model. An error makes a receipt "not checked", or is raised if `may_raise`."""
    for _, entries in itertools.groupby(sorted(sample, key=_load_key), key=_load_key):
        with contextlib.ExitStack() as loaded:
            engine: Engine | None = None
            for entry in entries:
                try:
                    receipt = _read(entry.document, options.content)
                    if engine is None:
                        engine = loaded.enter_context(contextlib.closing(_load(receipt, options, host)))
                    check = ReceiptCheck(receipt, engine, entry.quotes)
                    fields = msgspec.structs.asdict(check.run())
                except EdgeInferError as error:
                    if may_raise:
                        raise
                    yield Check(source=entry.source, verdict="not checked", reason=error.message)
                    continue
                yield Check(source=entry.source, lacks_text=check.lacks_text, **fields)


def _load_key(entry: Entry) -> list[str]:
    return [as_type(str, as_type(dict, entry.document).get(key)) for key in ("model", "kv_type")]
