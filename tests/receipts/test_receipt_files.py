"""Files of receipts and of payload logs: which are opened, written, removed or named."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from edgeinfer.errors import ReceiptError
from edgeinfer.platform.ed25519 import SigningKey
from edgeinfer.receipts import receipt as receipts
from edgeinfer.receipts.receipt import Signature

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
