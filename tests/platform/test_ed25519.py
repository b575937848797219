"""Ed25519: a key of small order signs nothing."""

import pytest

from edgeinfer.platform import ed25519


@pytest.mark.parametrize("sign", [0, 1 << 255])
@pytest.mark.parametrize("y", sorted(ed25519._SMALL_ORDER))
def test_a_key_of_small_order_signs_nothing(monkeypatch, y, sign):
    key = (y | sign).to_bytes(32, "little")
    forged = bytes([1, *bytes(63)])  # R is the neutral element and S is 0
    messages = [bytes([n]) for n in range(200)]
    assert not any(ed25519.is_signed_by(key, forged, message) for message in messages)
    monkeypatch.setattr(ed25519, "_SMALL_ORDER", ())
    assert any(ed25519.is_signed_by(key, forged, message) for message in messages)
