"""What some models' makers do to a text before it is split, and llama.cpp does not.

A converted file names it under a key of its own, which llama.cpp ignores.
"""

from __future__ import annotations

import unicodedata

NORMALIZER_KEY = "tokenizer.ggml.normalizer.form"
NFC = "nfc"


def normalized(text: str, form: str) -> str:
    """Return the text in `form`: Unicode's NFC, or as it is for ""."""
    return text if form != NFC or text.isascii() else unicodedata.normalize("NFC", text)
