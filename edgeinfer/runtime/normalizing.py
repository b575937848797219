"""What some models' makers do to a text before it is split, and llama.cpp does not.

A converted file names it under a key of its own, which llama.cpp ignores.
"""

from __future__ import annotations

import unicodedata

NORMALIZER_KEY = "tokenizer.ggml.normalizer.form"
NFC = "nfc"
BARE_LOWER_CASE = "bare-lower-case"


def normalized(text: str, form: str) -> str:
    """The text in `form`: Unicode's NFC, or BERT's lower case without accents; as it is for "".

    BERT's is https://github.com/huggingface/tokenizers/blob/main/tokenizers/src/normalizers/bert.rs.
    """
    if form == NFC:
        return text if text.isascii() else unicodedata.normalize("NFC", text)
    if form == BARE_LOWER_CASE:
        apart = text if text.isascii() else unicodedata.normalize("NFD", text)
        return "".join(char for char in apart if not _is_dropped(char)).lower()
    return text


def _is_dropped(char: str) -> bool:
    kind = unicodedata.category(char)
    return kind == "Mn" or (kind[0] == "C" and char not in "\t\n\r")
