"""Files of receipts and of payload logs: which are opened, written, removed or named."""

import json
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from edgeinfer.cli.receipt_file import ReceiptFile
from edgeinfer.errors import ConfigError, ReceiptError, UsageError
from edgeinfer.platform.ed25519 import SigningKey
from edgeinfer.receipts import receipt as receipts
from edgeinfer.receipts.receipt import Refusal, Signature
from edgeinfer.runtime.requests import GenerateRequest

from .test_receipts import _EXAMPLE, _run


@pytest.mark.parametrize("model", ["sub/evil.gguf", "EVIL.GGUF", "/m", "./m", "../m", "~/m"])
def test_a_path_in_a_receipt_is_never_opened(tmp_path: Path, model: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps({**_EXAMPLE, "model": model}))
    with pytest.raises(ReceiptError, match="never opened"):
        _run(tmp_path / "a.json")


def test_a_signature_by_a_key_of_small_order_does_not_match() -> None:
    receipt = receipts.to_receipt(_EXAMPLE)
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
        file.write(receipts.to_receipt(_EXAMPLE), is_private=True)
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
