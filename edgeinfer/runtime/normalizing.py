"""Unicode normalization of texts before they are tokenized, for models that need it.

llama.cpp does not normalize. A file that edgeinfer converted names the form in a separate key.
"""

from __future__ import annotations

import unicodedata

NORMALIZER_KEY = "tokenizer.ggml.normalizer.form"
NFC = "nfc"


def normalize_text(text: str, form: str) -> str:
    """Return the text in the normalization form "nfc", or unchanged for ""."""
    return text if form != NFC or text.isascii() else unicodedata.normalize("NFC", text)
