"""`edgeinfer verify`: check receipts and saved replies, or a sample of a payload log."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from edgeinfer import typed_options
from edgeinfer.cli.options import add_attached_options, add_load_options
from edgeinfer.cli.parser import LAUNCH, add_option
from edgeinfer.cli.result import Result
from edgeinfer.errors import EdgeInferError, ReceiptError, UsageError
from edgeinfer.host import EngineHost
from edgeinfer.platform.disk import path_errors
from edgeinfer.receipts import receipt as receipts
from edgeinfer.receipts.receipt import Receipt
from edgeinfer.receipts.replies import Entry, find_receipts, read_replies
from edgeinfer.receipts.verify import ReceiptCheck, TokenChoice, Verification, with_content
from edgeinfer.runtime.interface import Engine
from edgeinfer.safe_text import escape_hidden
from edgeinfer.units import format_ms

#: Most receipts of a sample that are named because they differ or were refused.
_MOST_NAMED = 20
#: Exit status if only log-probabilities were compared: the kernel revisions differ.
WITHIN_TOLERANCE = 9
#: Exit status if a payload log has no receipt.
NOTHING_CHECKED = 10
#: Descriptions of answers that did not end by themselves.
_CUT = {"cancelled": "that was cancelled", "deadline": "that reached its deadline"}


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A receipt's verification, or why it could not be checked; `source` is its file and line.

    `lacks_text`: the response's text is missing or was not compared.
    """

    source: str
    verification: Verification | None = None
    error: str = ""
    lacks_text: bool = False

    @property
    def verdict(self) -> str:
        return self.verification.verdict if self.verification else "not checked"

    @property
    def reason(self) -> str:
        return self.verification.reason if self.verification else self.error


class VerifyResult(Result, frozen=True, kw_only=True):
    """The checks of a sample of `n_receipts`; `without_receipt` counts answers that have none."""

    checks: tuple[Check, ...]
    n_receipts: int
    without_receipt: int = 0

    @property
    def exit_code(self) -> int:
        """Exit status: 1 if an answer differs, 5 if a receipt could not be checked, 9 if one is only
        within the tolerance, 10 if there is none.
        """
        if not self.checks:
            return NOTHING_CHECKED
        verdicts = {check.verdict for check in self.checks}
        statuses = {"differs": 1, "not checked": 5, "within tolerance": WITHIN_TOLERANCE}
        return next((status for verdict, status in statuses.items() if verdict in verdicts), 0)

    def human(self) -> str:
        if not self.checks:
            return f"nothing was checked: {self._without() or 'the log is empty'}"
        if len(self.checks) == self.n_receipts == 1 and self.checks[0].verification:
            note = f"\n{_NO_TEXT}" if self.checks[0].lacks_text else ""
            return describe(self.checks[0].verification) + note + self._without("\n", "more ")
        kinds = ("verified", "within tolerance", "differs", "not checked")
        verdicts = [check.verdict for check in self.checks]
        counts = [f"{verdicts.count(kind)} {kind}" for kind in kinds if kind in verdicts]
        suspects = [check for check in self.checks if check.reason]
        lines = [f"{c.source}: {c.verdict}: {c.reason}" for c in suspects[:_MOST_NAMED]]
        if len(suspects) > _MOST_NAMED:
            lines.append(f"and {len(suspects) - _MOST_NAMED} more")
        if n_texts := sum(check.lacks_text for check in self.checks):
            lines.append(f"{n_texts} of them: {_NO_TEXT}")
        n_checked = sum(check.verification is not None for check in self.checks)
        lines.append(f"checked {n_checked} of {self.n_receipts} receipts: {', '.join(counts)}")
        return "\n".join(map(escape_hidden, lines)) + self._without("\n", "more ")

    def _without(self, start: str = "", more: str = "") -> str:
        noun = "answer has" if self.without_receipt == 1 else "answers have"
        n = self.without_receipt
        return f"{start}{n} {more}{noun} no receipt" if n else ""


_NO_TEXT = "only the tokens in the receipt were compared, not the text"


def describe(result: Verification) -> str:
    """Describe the verdict, with the first token that differs."""
    signer = f", signed by {result.signer}" if result.signer else ", not signed"
    tokens = f"{result.n_answer} tokens"
    if cut := _CUT.get(result.finish_reason):
        tokens = f"the first {tokens} of an answer {cut},"
    lines = [f"{result.verdict}: {tokens} of {result.model}{signer}"]
    if result.reason:
        lines.append(result.reason)
    if result.position is not None:
        lines += [f"  receipt: {_token(result.expected)}", f"  engine:  {_token(result.chosen)}"]
    if result.own_revision != result.kernel_revision:
        lines.append(
            f"the receipt is of kernel revision {result.kernel_revision}, and this program has "
            f"{result.own_revision}: only log-probabilities were compared"
        )
    if result.mean_difference is not None:
        most = f"at most {result.most_difference:.3f}"
        lines.append(f"they differ by {result.mean_difference:.3f} on average, {most}")
    times = (format_ms(result.seconds * 1000), format_ms(result.generation_seconds * 1000))
    lines.append(f"checked in {times[0]}; generation took {times[1]}")
    return "\n".join(lines)


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
    raise argparse.ArgumentTypeError(f"{text!r} is not a share, such as 1%")


def run(options: argparse.Namespace, host: EngineHost) -> VerifyResult:
    """Check receipts; exit status 0 if all answers verify. Raises UsageError, ReceiptError."""
    if (options.receipt is None) == (options.log is None):
        raise UsageError("give a receipt, or a payload log with --log", hint="edgeinfer verify --help")
    sample, unread = list[Entry](), list[Check]()
    spare, least = list[Entry](), 1.0
    n_receipts = n_without = 0
    for source, documents in _replies(options):
        if isinstance(documents, ReceiptError):
            unread.append(Check(source=source, error=documents.message))
            continue
        entries, n_answers = find_receipts(documents, source)
        n_receipts += len(entries)
        n_without += n_answers - len(entries)
        for entry in entries:
            draw = random.random()
            if draw < options.sample:
                sample.append(entry)
            elif draw < least:  # the one to check if the share of few receipts is none
                spare, least = [entry], draw
    if options.receipt and not n_receipts and not unread:
        hint = "`edgeinfer run --receipt FILE` writes one, and requests ask for it by `receipt: true`"
        raise ReceiptError(f"{options.receipt} contains no receipt", hint=hint)
    outcomes = list(_check_all(sample or spare, options, host))
    if n_receipts == 1 and not unread and isinstance(outcome := outcomes[0][1], EdgeInferError):
        raise outcome  # the error of a single receipt is the command's
    checks = (*unread, *itertools.starmap(_to_check, outcomes))
    return VerifyResult(checks=checks, n_receipts=n_receipts, without_receipt=n_without)


def _replies(options: argparse.Namespace) -> Iterator[tuple[str, list[Any] | ReceiptError]]:
    """Yield the replies of a file, of stdin or of a payload log. Raises UsageError, ReceiptError."""
    if options.receipt == "-":
        yield from read_replies(sys.stdin.buffer, "stdin")
        return
    if options.log and not Path(options.log).is_dir():
        hint = "`edgeinfer serve --log-payloads FOLDER` writes one"
        raise UsageError(f"{options.log} is not a folder with a payload log", hint=hint)
    paths = [Path(options.receipt)] if options.receipt else sorted(Path(options.log).glob("*.jsonl"))
    for path in paths:
        with path_errors(path, "check the path"), path.open("rb") as file:
            yield from read_replies(file, str(path))


def _read(document: Any, content: str | None) -> Receipt:
    receipt = receipts.to_receipt(document)
    if content is None:
        return receipt
    with path_errors(content, "check the path"):
        return with_content(receipt, receipts.parse(Path(content).read_bytes()))


def _load(receipt: Receipt, options: argparse.Namespace, host: EngineHost) -> Engine:
    name = options.model or receipt.model
    if not options.model and name.startswith(("/", ".", "~")):  # a receipt opens no files
        raise ReceiptError(f"the receipt's model is a file, {name!r}", hint="name a model: `--model`")
    load = typed_options.load_options(options, host.config.load)
    if options.kv_type is None:
        load = msgspec.structs.replace(load, kv_type=receipt.kv_type)
    return host.engine(name, msgspec.structs.replace(load, is_counted=False))


def _check_all(
    sample: list[Entry], options: argparse.Namespace, host: EngineHost
) -> Iterator[tuple[Entry, Verification | EdgeInferError]]:
    """Check a sample, model by model; yield an error for a receipt that cannot be checked."""
    pairs = list[tuple[Entry, Receipt]]()
    for entry in sample:
        try:
            pairs.append((entry, _read(entry.document, options.content)))
        except ReceiptError as error:
            yield entry, error
    pairs.sort(key=_load_key)
    for _, group in itertools.groupby(pairs, key=_load_key):
        same = list(group)
        try:
            engine = _load(same[0][1], options, host)
        except EdgeInferError as error:
            yield from [(entry, error) for entry, _ in same]
            continue
        with contextlib.closing(engine):
            for entry, receipt in same:
                yield entry, _check(entry, receipt, engine)


def _check(entry: Entry, receipt: Receipt, engine: Engine) -> Verification | EdgeInferError:
    try:
        return ReceiptCheck(receipt, engine, entry.quotes).run()
    except EdgeInferError as error:
        return error


def _to_check(entry: Entry, outcome: Verification | EdgeInferError) -> Check:
    if isinstance(outcome, EdgeInferError):
        return Check(source=entry.source, error=outcome.message)
    is_compared = entry.is_lone or outcome.is_text_compared or outcome.verdict == "differs"
    return Check(source=entry.source, verification=outcome, lacks_text=not is_compared)


def _load_key(pair: tuple[Entry, Receipt]) -> tuple[str, str]:
    return pair[1].model, pair[1].kv_type
