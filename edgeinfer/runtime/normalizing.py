"""Unicode normalization of texts before they are tokenized, for models that need it.

llama.cpp does not normalize. GGUF files that edgeinfer converted name the form in NORMALIZER_KEY.
"""

from __future__ import annotations

import unicodedata

NORMALIZER_KEY = "tokenizer.ggml.normalizer.form"
NFC = "nfc"


def normalize_text(text: str, form: str) -> str:
    """Return `text` in Unicode form NFC if `form` is "nfc", otherwise unchanged."""
    return text if form != NFC or text.isascii() else unicodedata.normalize("NFC", text)
