"""`edgeinfer verify`: check one receipt, or a sample of those in a payload log."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from edgeinfer import requesting
from edgeinfer.cli.options import add_attached_options, add_load_options
from edgeinfer.cli.parser import LAUNCH, add_option
from edgeinfer.cli.result import Result
from edgeinfer.errors import EdgeInferError, ReceiptError, UsageError
from edgeinfer.host import Host
from edgeinfer.platform.disk import path_errors
from edgeinfer.receipts import receipt as receipts
from edgeinfer.receipts.receipt import MAX_BYTES, Receipt
from edgeinfer.receipts.verify import Quote, TokenChoice, Verification, verify, with_content
from edgeinfer.runtime.interface import Engine
from edgeinfer.safe_text import escape_hidden
from edgeinfer.units import format_ms

#: Most receipts of a sample that are named because they differ or were refused.
_MOST_NAMED = 20
#: Exit status if only log-probabilities were compared: the kernel revisions differ.
WITHIN_TOLERANCE = 9
#: Descriptions of answers that did not end by themselves.
_CUT = {"cancelled": "that was cancelled", "deadline": "that reached its deadline"}


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A receipt's verification, or why it could not be checked; `place` is its file and line.

    `lacks_text`: the response's text is missing or was not compared.
    """

    place: str
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
    """The checks of all receipts; `without_receipt` counts answers of a log that have none."""

    checks: tuple[Check, ...]
    without_receipt: int = 0

    @property
    def exit_code(self) -> int:
        """Exit status: 1 if an answer differs, 5 if a receipt could not be checked, 9 if one is only
        within the tolerance.
        """
        verdicts = {check.verdict for check in self.checks}
        statuses = {"differs": 1, "not checked": 5, "within tolerance": WITHIN_TOLERANCE}
        return next((status for verdict, status in statuses.items() if verdict in verdicts), 0)

    def human(self) -> str:
        if len(self.checks) == 1 and self.checks[0].verification and not self.without_receipt:
            note = f"\n{_NO_TEXT}" if self.checks[0].lacks_text else ""
            return describe(self.checks[0].verification) + note
        kinds = ("verified", "within tolerance", "differs", "not checked")
        verdicts = [check.verdict for check in self.checks]
        counts = [f"{verdicts.count(kind)} {kind}" for kind in kinds]
        suspects = [check for check in self.checks if check.reason]
        named = suspects[:_MOST_NAMED]
        lines = [escape_hidden(f"{c.place}: {c.verdict}: {c.reason}") for c in named]
        if len(suspects) > _MOST_NAMED:
            lines.append(f"and {len(suspects) - _MOST_NAMED} more")
        if n_texts := sum(check.lacks_text for check in self.checks):
            lines.append(f"{n_texts} of them: {_NO_TEXT}")
        total = f"{', '.join(counts)} of {len(self.checks)} receipts"
        without = f"; {self.without_receipt} answers have none" if self.without_receipt else ""
        return "\n".join([*lines, f"{total}{without}"])


_NO_TEXT = "only the tokens in the receipt were compared, not the text"


def describe(result: Verification) -> str:
    """Describe the verdict, with the first token that differs."""
    signer = f", signed by {result.signer}" if result.signer else ", not signed"
    answer = f"{result.n_answer} tokens of {result.model}"
    if cut := _CUT.get(result.finish_reason):
        answer = f"the first {result.n_answer} tokens of an answer {cut}, of {result.model}"
    lines = [f"{result.verdict}: {answer}{signer}"]
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
    """Check receipts; exit status 0 if all answers verify. Raises UsageError, ReceiptError."""
    if (options.receipt is None) == (options.log is None):
        raise UsageError("give a receipt, or a payload log with --log", hint="edgeinfer verify --help")
    sample, unread = list[Entry](), list[Check]()
    n_receipts = n_without = 0
    for place, line in _lines(options):
        try:
            entries, n_answers = find_receipts(receipts.parse_json(line), place)
        except ReceiptError as error:
            if place == options.receipt:
                raise
            unread.append(Check(place=place, error=error.message))
            continue
        n_receipts += len(entries)
        n_without += n_answers - len(entries)
        sample += [entry for entry in entries if random.random() < options.sample]
    if not n_receipts and not unread:
        raise ReceiptError(
            f"{options.receipt or options.log} contains no receipt",
            hint="`edgeinfer run --receipt FILE` writes one",
        )
    if (n_receipts, n_without, len(sample), unread) == (1, 0, 1, []):  # its error is the command's
        receipt = _read(sample[0].document, options.content)
        with contextlib.closing(_load(receipt, options, host)) as engine:
            return VerifyResult(checks=(_verify(sample[0], receipt, engine),))
    checks = (*unread, *_check_all(sample, options, host))
    return VerifyResult(checks=checks, without_receipt=n_without)


def _lines(options: argparse.Namespace) -> Iterator[tuple[str, bytes]]:
    """Yield the place and the content of a file, or of each of its lines. Raises UsageError."""
    paths = [Path(options.receipt)] if options.receipt else sorted(Path(options.log).glob("*.jsonl"))
    if not paths:
        raise UsageError(f"{options.log} has no payload log", hint="`serve --log-payloads` writes one")
    for path in paths:
        with path_errors(path, "check the path"), path.open("rb") as file:
            if path.suffix != ".jsonl":
                yield str(path), file.read(MAX_BYTES + 1)
                continue
            for number in itertools.count(1):
                line = chunk = file.readline(MAX_BYTES + 1)
                while chunk and not chunk.endswith(b"\n"):  # skip the rest of a line that is too long
                    chunk = file.readline(MAX_BYTES)
                if not line:
                    break
                if not line.isspace():
                    yield f"{path}:{number}", line


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A receipt, and the answer next to it; None if the answer is unknown."""

    place: str = ""
    document: dict[str, Any]
    quote: Quote | None = None
    is_alone: bool = False


def find_receipts(document: Any, place: str = "") -> tuple[list[Entry], int]:
    """Return the receipts of a document, and the number of its answers.

    A document is a receipt, an answer of the endpoint, a line of a batch, or a line of a payload log.
    """
    if not isinstance(document, dict):
        return [], 0
    if "content_sha256" in document:
        return [Entry(place=place, document=document, is_alone=True)], 1
    if isinstance(body := document.get("response"), dict) and "body" in body:
        return find_receipts(body["body"], place)
    if isinstance(data := document.get("data"), dict):
        answers = [answer for answer in _list(data.get("answers")) if isinstance(answer, dict)]
        several = [(answer.get("receipt"), answer) for answer in answers]
    else:
        several = list(_pairs(document))
    entries = [
        Entry(place=place, document=receipt, quote=_quote(answer))
        for receipt, answer in several
        if isinstance(receipt, dict) and "content_sha256" in receipt
    ]
    return entries, len(several)


def _pairs(document: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the receipts in an answer of the endpoint, each with its choice."""
    several = _list(document["receipts"]) if "receipts" in document else [document.get("receipt")]
    choices = [choice for choice in _list(document.get("choices")) if isinstance(choice, dict)]
    by_index = {index: choice for choice in choices if isinstance(index := choice.get("index"), int)}
    for index, receipt in enumerate(several):
        yield receipt, by_index.get(index) if choices else document


def _quote(answer: Any) -> Quote | None:
    """Return the text in a choice, or in an answer of a payload log or an API; None if unknown."""
    if not isinstance(answer, dict):
        return None
    if isinstance(message := answer.get("message"), dict):
        answer = message
        text = message.get("content") or ""
    else:
        names = ("text", "content", "response", "result")
        text = next((answer[name] for name in names if isinstance(answer.get(name), str)), None)
    reasoning = answer.get("reasoning_content", answer.get("reasoning"))
    calls = [_call(call) for call in _list(answer.get("tool_calls"))]
    if not isinstance(text, str):
        return None
    return Quote(
        text=text,
        reasoning=reasoning if isinstance(reasoning, str) else None,
        calls=None if None in calls else tuple(call for call in calls if call is not None),
    )


def _call(call: Any) -> tuple[str, str] | None:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return None
    name, arguments = function.get("name"), function.get("arguments")
    return (name, arguments) if isinstance(name, str) and isinstance(arguments, str) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _read(document: Any, content: str | None) -> Receipt:
    receipt = receipts.to_receipt(document)
    if content is None:
        return receipt
    with path_errors(content, "check the path"):
        return with_content(receipt, receipts.parse(Path(content).read_bytes()))


def _load(receipt: Receipt, options: argparse.Namespace, host: Host) -> Engine:
    name = options.model or receipt.model
    if not options.model and name.startswith(("/", ".", "~")):  # a receipt opens no files
        raise ReceiptError(f"the receipt's model is a file, {name!r}", hint="name a model: `--model`")
    load = requesting.load_options(options, host.config.load)
    if options.kv_type is None:
        load = msgspec.structs.replace(load, kv_type=receipt.kv_type)
    return host.engine(name, msgspec.structs.replace(load, is_counted=False))


def _check_all(sample: list[Entry], options: argparse.Namespace, host: Host) -> Iterator[Check]:
    """Check a sample, model by model; receipts that cannot be checked are named."""
    entries = list[tuple[Entry, Receipt]]()
    for entry in sample:
        try:
            entries.append((entry, _read(entry.document, options.content)))
        except ReceiptError as error:
            yield Check(place=entry.place, error=error.message)
    entries.sort(key=lambda entry: _load_key(entry[1]))
    for _, group in itertools.groupby(entries, key=lambda entry: _load_key(entry[1])):
        same = list(group)
        try:
            with contextlib.closing(_load(same[0][1], options, host)) as engine:
                for entry, receipt in same:
                    yield _check(entry, receipt, engine)
        except EdgeInferError as error:
            for entry, _ in same:
                yield Check(place=entry.place, error=error.message)


def _load_key(receipt: Receipt) -> tuple[str, str]:
    return receipt.model, receipt.kv_type


def _check(entry: Entry, receipt: Receipt, engine: Engine) -> Check:
    try:
        return _verify(entry, receipt, engine)
    except EdgeInferError as error:
        return Check(place=entry.place, error=error.message)


def _verify(entry: Entry, receipt: Receipt, engine: Engine) -> Check:
    result = verify(receipt, engine, entry.quote)
    lacks_text = not entry.is_alone and not result.is_text_compared and result.verdict != "differs"
    return Check(place=entry.place, verification=result, lacks_text=lacks_text)
