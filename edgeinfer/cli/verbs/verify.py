"""`edgeinfer verify`: check receipts of answers, single ones or a sample of a payload log."""

from __future__ import annotations

import argparse
import contextlib
import random
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from edgeinfer import requesting
from edgeinfer.cli.options import add_attached_options, add_load_options
from edgeinfer.cli.parser import LAUNCH, add_option
from edgeinfer.cli.result import Result
from edgeinfer.errors import EdgeInferError, ReceiptError, UsageError
from edgeinfer.host import Host
from edgeinfer.receipts import receipt as receipts
from edgeinfer.receipts.receipt import MAX_BYTES, Receipt
from edgeinfer.receipts.verify import TokenChoice, Verification, verify, with_content
from edgeinfer.runtime.interface import Engine
from edgeinfer.units import format_ms

#: Most receipts that are named when several of a sample differ or are refused.
_MOST_NAMED = 20


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A receipt's verification, or why it could not be checked; `place` is its file and line."""

    place: str
    verification: Verification | None = None
    error: str = ""

    @property
    def verdict(self) -> str:
        return self.verification.verdict if self.verification else "not checked"

    @property
    def reason(self) -> str:
        return self.verification.reason if self.verification else self.error


class VerifyResult(Result, frozen=True, kw_only=True):
    """The checks of all receipts; `without_receipt` answers of a log have none."""

    checks: tuple[Check, ...]
    without_receipt: int = 0

    @property
    def exit_code(self) -> int:
        """Exit status: 1 if an answer differs, 5 if a receipt could not be checked."""
        verdicts = {check.verdict for check in self.checks}
        return 1 if "differs" in verdicts else 5 * ("not checked" in verdicts)

    def human(self) -> str:
        if len(self.checks) == 1 and self.checks[0].verification and not self.without_receipt:
            return describe(self.checks[0].verification)
        kinds = ("verified", "within tolerance", "differs", "not checked")
        verdicts = [check.verdict for check in self.checks]
        counts = [f"{verdicts.count(kind)} {kind}" for kind in kinds]
        suspects = [check for check in self.checks if check.reason]
        lines = [f"{check.place}: {check.verdict}: {check.reason}" for check in suspects[:_MOST_NAMED]]
        if len(suspects) > _MOST_NAMED:
            lines.append(f"and {len(suspects) - _MOST_NAMED} more")
        total = f"{', '.join(counts)} of {len(self.checks)} receipts"
        without = f"; {self.without_receipt} answers have none" if self.without_receipt else ""
        return "\n".join([*lines, f"{total}{without}"])


def describe(result: Verification) -> str:
    """Return the verdict for a person, with the first token that differs."""
    signer = f", signed by {result.signer}" if result.signer else ", not signed"
    lines = [f"{result.verdict}: {result.n_answer} tokens of {result.model}{signer}"]
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
        most = f"{result.most_difference:.3f} at most"
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
    help = "receipt, or a file of answers with receipts (JSON, or JSON lines)"
    parser.add_argument("receipt", nargs="?", metavar="RECEIPT", help=help)
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


def run(options: argparse.Namespace, host: Host) -> VerifyResult:
    """Check; exit status 1 if an answer differs. Raises UsageError, ReceiptError."""
    if (options.receipt is None) == (options.log is None):
        raise UsageError("give a receipt, or a payload log with --log", hint="edgeinfer verify --help")
    sample: list[tuple[str, Any]] = []
    n_receipts = n_without = 0
    for place, line in _lines(options):
        entries, n_answers = find_receipts(receipts.parse_json(line))
        n_receipts += len(entries)
        n_without += n_answers - len(entries)
        sample += [(place, entry) for entry in entries if random.random() < options.sample]
    if not n_receipts:
        raise ReceiptError(
            f"{options.receipt or options.log} has no receipt",
            hint="`edgeinfer run --receipt FILE` writes one",
        )
    if (n_receipts, n_without, len(sample)) == (1, 0, 1):  # its error is the command's
        entry = _read(sample[0][1], options.content)
        with contextlib.closing(_load(entry, options, host)) as engine:
            return VerifyResult(checks=(Check(place=sample[0][0], verification=verify(entry, engine)),))
    return VerifyResult(checks=tuple(_check_all(sample, options, host)), without_receipt=n_without)


def _lines(options: argparse.Namespace) -> Iterator[tuple[str, bytes]]:
    """Yield the place and the content of a file, or of each of its lines. Raises UsageError."""
    paths = [Path(options.receipt)] if options.receipt else sorted(Path(options.log).glob("*.jsonl"))
    if not paths:
        raise UsageError(f"{options.log} has no payload log", hint="`serve --log-payloads` writes one")
    for path in paths:
        try:
            with path.open("rb") as file:
                if path.suffix != ".jsonl":
                    yield str(path), file.read(MAX_BYTES + 1)
                    continue
                for number, line in enumerate(file, 1):
                    if line.endswith(b"\n"):  # else it was torn by a crash
                        yield f"{path}:{number}", line
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}", hint="check the path") from error


def find_receipts(document: Any) -> tuple[list[Any], int]:
    """Return the receipts of a document, and how many answers it has.

    It is a receipt, an answer of the endpoint, a line of a batch, or a line of a payload log.
    """
    if not isinstance(document, dict):
        return [], 0
    if "content_sha256" in document:
        return [document], 1
    if isinstance(body := document.get("response"), dict) and "body" in body:
        return find_receipts(body["body"])
    answers = [document]
    if isinstance(data := document.get("data"), dict):
        answers = [answer for answer in data.get("answers", ()) if isinstance(answer, dict)]
    several = [entry for answer in answers for entry in answer.get("receipts", [answer.get("receipt")])]
    return [e for e in several if isinstance(e, dict) and "content_sha256" in e], len(several)


def _read(document: Any, content: str | None) -> Receipt:
    receipt = receipts.to_receipt(document)
    if content is None:
        return receipt
    try:
        return with_content(receipt, receipts.parse(Path(content).read_bytes()))
    except OSError as error:
        raise UsageError(f"{content}: {error.strerror}", hint="check the path") from error


def _load(receipt: Receipt, options: argparse.Namespace, host: Host) -> Engine:
    name = options.model or receipt.model
    if not options.model and name.startswith(("/", ".", "~")):  # a receipt chooses no file to open
        raise ReceiptError(f"the receipt's model is a file, {name}", hint="name a model: `--model`")
    load = requesting.load_options(options, host.config.load)
    if options.kv_type is None:
        load = msgspec.structs.replace(load, kv_type=receipt.kv_type)
    return host.engine(name, msgspec.structs.replace(load, is_counted=False))


def _check_all(
    sample: list[tuple[str, Any]], options: argparse.Namespace, host: Host
) -> Iterator[Check]:
    """Check a sample, one model after the other; what cannot be checked is named."""
    entries = list[tuple[str, Receipt]]()
    for place, document in sample:
        try:
            entries.append((place, _read(document, options.content)))
        except ReceiptError as error:
            yield Check(place=place, error=error.message)
    entries.sort(key=lambda entry: _load_key(entry[1]))
    for _, group in groupby(entries, key=lambda entry: _load_key(entry[1])):
        same = list(group)
        try:
            with contextlib.closing(_load(same[0][1], options, host)) as engine:
                for place, receipt in same:
                    yield _check(place, receipt, engine)
        except EdgeInferError as error:
            for place, _ in same:
                yield Check(place=place, error=error.message)


def _load_key(receipt: Receipt) -> tuple[str, str]:
    return receipt.model, receipt.kv_type


def _check(place: str, receipt: Receipt, engine: Engine) -> Check:
    try:
        return Check(place=place, verification=verify(receipt, engine))
    except EdgeInferError as error:
        return Check(place=place, error=error.message)
