"""Text normalization before tokenizing that some models need and llama.cpp lacks.

A converted file names it under a separate key, which llama.cpp ignores.
"""

from __future__ import annotations

import unicodedata

NORMALIZER_KEY = "tokenizer.ggml.normalizer.form"
NFC = "nfc"


def normalize_text(text: str, form: str) -> str:
    """Return the text in `form`: Unicode's NFC, or as it is for ""."""
    return text if form != NFC or text.isascii() else unicodedata.normalize("NFC", text)
