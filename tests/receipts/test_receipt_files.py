"""Files of receipts and of payload logs: which are opened, written, removed or named."""

import argparse
import errno
import io
import json
import os
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from edgeinfer.cli.receipt_file import ReceiptFile
from edgeinfer.cli.verbs import verify as verb
from edgeinfer.cli.verbs.verify import VerifyResult, add_arguments, describe, run
from edgeinfer.errors import ConfigError, ReceiptError, UsageError
from edgeinfer.platform.ed25519 import SigningKey
from edgeinfer.receipts import receipt as receipts
from edgeinfer.receipts.receipt import Refusal, Signature
from edgeinfer.receipts.verify import ReceiptCheck, Verification
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.runtime.revision import KERNEL_REVISION

from .example import EXAMPLE, INFO

_LOGGED = b'{"data": {"answers": [{"text": "b"}]}}\n'


def _run(*arguments: object) -> VerifyResult:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([*map(str, arguments)]), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["sub/evil.gguf", "EVIL.GGUF", "/m", "./m", "../m", "~/m"])
def test_a_path_in_a_receipt_is_never_opened(tmp_path: Path, model: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps({**EXAMPLE, "model": model}))
    with pytest.raises(ReceiptError, match="never opened"):
        _run(tmp_path / "a.json")


def test_a_signature_by_a_key_of_small_order_does_not_match() -> None:
    receipt = receipts.to_receipt(EXAMPLE)
    signed = receipts.sign(receipt, SigningKey(bytes(32)))
    assert not signed.alteration()
    forged = Signature(public_key="01" + "00" * 31, value="01" + "00" * 63)
    altered = replace(receipt, signature=forged)
    assert altered.alteration() == "the signature does not match"


def test_no_private_receipt_is_left_without_its_content(tmp_path: Path) -> None:
    file, content = ReceiptFile(tmp_path / "a"), tmp_path / "a.content"
    content.mkdir()
    with pytest.raises(UsageError, match=r"a\.content is a folder"):
        file.record(GenerateRequest(prompt="a"), is_private=True)
    with pytest.raises(UsageError, match=r"a\.content: Is a directory"):
        file.write(receipts.to_receipt(EXAMPLE), is_private=True)
    assert os.listdir(tmp_path) == ["a.content"]


@pytest.mark.parametrize("is_private", [False, True])
def test_a_refused_receipt_removes_the_old_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_private: bool
) -> None:
    file = ReceiptFile(tmp_path / "a")
    for name in ("a", "a.content"):
        (tmp_path / name).write_text("{}")
    file.write(Refusal(refused="no reason"), is_private=is_private)
    assert os.listdir(tmp_path) == ([] if is_private else ["a.content"])
    assert f"edgeinfer: the old {file.path} was removed\n" in capsys.readouterr().err
    os.mkfifo(file.path)
    file.write(Refusal(refused="no reason"), is_private=False)
    assert capsys.readouterr().err == "edgeinfer: no receipt: no reason\n"
    assert file.path.is_fifo()


def test_a_fifo_is_not_waited_for_as_a_key(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "key.pem")
    with pytest.raises(ConfigError, match="not a regular file"):
        receipts.load_key(str(tmp_path / "key.pem"))


def test_odd_files_of_a_log_are_named_and_the_others_checked(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").mkdir()
    os.mkfifo(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl").symlink_to("nowhere")
    (tmp_path / "d.jsonl").write_bytes(_LOGGED)
    (tmp_path / "e.txt").symlink_to("nowhere")
    result = _run("--log", tmp_path)
    odd, gone = "not a regular file", "No such file or directory"
    assert [(Path(check.source).name, check.reason) for check in result.checks] == [
        ("a.jsonl", odd),
        ("b.jsonl", odd),
        ("c.jsonl", gone),
    ]
    assert (result.without_receipt, result.exit_code) == (1, 5)


def test_an_unfinished_last_line_of_a_log_is_only_a_note(tmp_path: Path) -> None:
    log = tmp_path / "a.jsonl"
    log.write_bytes(_LOGGED + b'{"data": {"ans')
    result = _run("--log", tmp_path)
    assert (result.checks, result.without_receipt, result.exit_code) == ([], 1, 10)
    assert f"{log}:2: the last line is unfinished" in result.human()
    log.write_bytes(b'{"data": {"ans\n' + _LOGGED)
    result = _run("--log", tmp_path)
    assert ([check.source for check in result.checks], result.notes) == ([f"{log}:1"], [])
    assert result.exit_code == 5


def test_a_log_that_may_not_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="none: No such file"):
        _run("--log", tmp_path / "none")

    def refuse(_folder: str) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(UsageError, match="Permission denied"):
        _run("--log", tmp_path)


@pytest.fixture
def all_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every receipt verify, without an engine."""
    verified = Verification(verdict="verified", model="m", finish_reason="stop", n_answer=2)
    monkeypatch.setattr(ReceiptCheck, "run", lambda _check: verified)
    monkeypatch.setattr(verb, "_load", lambda *_arguments: io.BytesIO())  # it can be closed


@pytest.mark.usefixtures("all_verify")
def test_each_of_several_files_has_a_verdict(tmp_path: Path) -> None:
    texts = [json.dumps(EXAMPLE), json.dumps(EXAMPLE, indent=1), '{"text": "x"}', "{"]
    for name, text in zip("abcd", texts, strict=True):
        (tmp_path / name).write_text(text)
    lines = _run(tmp_path / "a", tmp_path / "b").human().splitlines()
    assert lines[:2] == [f"{tmp_path}/{name}:1: verified: 2 tokens of m" for name in "ab"]
    assert lines[2] == "checked 2 of 2 receipts: 2 verified"

    paths = [tmp_path / name for name in "abcde"]
    result = _run(*paths)
    lines = result.human().splitlines()
    reasons = ("contains no receipt", "this is not a receipt: the text is not JSON", "No such file")
    for line, path, reason in zip(lines[:3], paths[2:], reasons, strict=True):
        assert line.startswith(f"{path}: not checked: ")
        assert reason in line
    assert lines[5] == "checked 2 of 2 receipts: 2 verified, 3 not checked"
    assert (result.exit_code, result.without_receipt) == (5, 0)
    for path in paths[2:]:
        with pytest.raises((ReceiptError, UsageError)):
            _run(path)


@pytest.mark.usefixtures("all_verify")
def test_a_reply_without_a_receipt_next_to_one_with_it_is_not_verified(tmp_path: Path) -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "EVIL"}}]}
    last = {"choices": [{"index": 0, "delta": {"content": "x"}}], "receipt": EXAMPLE}
    for hidden in ({}, {"specversion": "1.0"}, {"custom_id": "1"}, {"content_sha256": ""}):
        events = (chunk | hidden, last)
        stream = "".join(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n" for event in events)
        (tmp_path / "reply.sse").write_text(stream)
        assert _run(tmp_path / "reply.sse").exit_code == 5, hidden
    comment = f": ping\u2028data: {json.dumps(chunk)}\n\ndata: {json.dumps(last)}\n\n"
    (tmp_path / "reply.sse").write_text(comment)
    with pytest.raises(ReceiptError, match="not JSON"):
        _run(tmp_path / "reply.sse")


@pytest.mark.usefixtures("all_verify")
def test_a_verdict_on_a_part_of_a_reply_s_text_has_its_own_status(tmp_path: Path) -> None:
    (tmp_path / "reply").write_text(json.dumps({"usage": {}, "receipt": EXAMPLE}))
    result = _run(tmp_path / "reply")
    assert result.exit_code == 9
    assert "not the whole text" in result.human()


@pytest.mark.usefixtures("all_verify")
def test_every_one_of_many_files_has_a_verdict(tmp_path: Path) -> None:
    paths = [tmp_path / f"{n}.json" for n in range(30)]
    for path in paths:
        path.write_text(json.dumps(EXAMPLE))
    assert _run(*paths).human().count(".json:1: verified:") == 30
    (tmp_path / "all.jsonl").write_text(f"{json.dumps(EXAMPLE)}\n" * 30)
    assert ".jsonl:" not in _run(tmp_path / "all.jsonl").human()


@pytest.mark.usefixtures("all_verify")
def test_progress_is_shown_on_a_terminal_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(EXAMPLE))
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        _run(tmp_path / "a.json")
        assert ("checking" in capsys.readouterr().err) == is_terminal


def test_a_receipt_is_not_written_to_a_file_named_dash() -> None:
    with pytest.raises(UsageError, match="needs a file") as refused:
        ReceiptFile.parse("-")
    assert "--receipt FILE" in (refused.value.hint or "")


def test_a_receipt_of_a_newer_format_asks_for_an_update() -> None:
    with pytest.raises(ReceiptError, match="version 2, is newer") as refused:
        receipts.to_receipt({**EXAMPLE, "version": 2, "new": True})
    assert refused.value.hint == "update edgeinfer"


class _Engine:
    """An engine that computes nothing."""

    info = INFO


def _check(**fields: object) -> Verification:
    receipt = receipts.to_receipt({**EXAMPLE, **fields, "sha256": ""})
    return ReceiptCheck(replace(receipt, sha256=receipt.digest()), _Engine()).run()  # type: ignore[arg-type]


def test_a_newer_revision_names_the_program_that_made_the_receipt() -> None:
    with pytest.raises(ReceiptError) as refused:
        _check(kernel_revision=999, program="0.2.0")
    hint = "update edgeinfer, or check it with the program that made it"
    assert refused.value.hint == f"{hint} (edgeinfer '0.2.0', kernel revision 999)"


def test_a_newer_revision_of_another_architecture_is_not_compared_by_number(monkeypatch) -> None:
    revision = KERNEL_REVISION % 1000 + 1
    monkeypatch.setattr("edgeinfer.receipts.verify.KERNEL_REVISION", KERNEL_REVISION % 1000 + 1000)
    newer = f"the receipt is of kernel revision {revision}, which is newer than this program"
    with pytest.raises(ReceiptError, match=f"^{newer}$"):
        _check(kernel_revision=revision)


def test_a_check_by_another_model_does_not_speak_of_its_tokens() -> None:
    [line, *_] = describe(_check(model_sha256="cd" * 32))
    assert line == "differs: m is not the receipt's model: its file has another digest"
    changed = receipts.to_receipt({**EXAMPLE, "seconds": 9.0})
    [line, *_] = describe(ReceiptCheck(changed, _Engine()).run())  # type: ignore[arg-type]
    assert line == "differs: the receipt was changed: its digest does not match"


def test_a_private_receipt_s_hint_fits_the_command_line_and_http() -> None:
    with pytest.raises(ReceiptError, match="private") as refused:
        _check(content=None)
    assert "--content FILE" in (refused.value.hint or "")
    assert "over HTTP, send the receipt with its content" in (refused.value.hint or "")
