"""Text normalization before tokenizing, for models that need it; llama.cpp has none.

A converted file names the form under a separate key, which llama.cpp ignores.
"""

from __future__ import annotations

import unicodedata

NORMALIZER_KEY = "tokenizer.ggml.normalizer.form"
NFC = "nfc"


def normalize_text(text: str, form: str) -> str:
    """Return the text in `form`: Unicode's NFC, or unchanged for ""."""
    return text if form != NFC or text.isascii() else unicodedata.normalize("NFC", text)
