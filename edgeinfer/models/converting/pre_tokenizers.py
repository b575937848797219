"""How a text is cut before pairs are merged: from tokenizer.json's words to llama.cpp's name for it.

llama.cpp has a fixed set, each under the name of the model that brought it (`llama-vocab.cpp`). The row
is found by what tokenizer.json says it does, never by the model's name.
"""

from __future__ import annotations

from typing import Any

from edgeinfer.errors import ConversionError

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_SLASH_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

#: What a ByteLevel step splits by itself.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_SLASH_TAIL}"
O200K = rf"{_CASED % (_CONTRACTIONS + '?', _CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_SLASH_TAIL}"
_DIGIT = "digit"
_DIGITS = "digits"
_PUNCTUATION = "punctuation"

#: The steps in order → (name, name where whole words in the vocabulary are taken as they are). The one
#: called gpt-4o leaves combining marks out of words, so O200K goes by another that has its pattern.
_NAMES: dict[tuple[str, ...], tuple[str, str]] = {
    (GPT2,): ("gpt-2", ""),
    (CL100K,): ("dbrx", "llama-bpe"),
    (QWEN2,): ("qwen2", ""),
    (QWEN35,): ("qwen35", ""),
    (TEKKEN,): ("", "tekken"),
    (O200K,): ("granite-embed-multi-97m", "granite-embed-multi-97m"),
    (_DIGIT, GPT2): ("smollm", ""),
    (_PUNCTUATION, GPT2, _DIGITS, "[0-9][0-9][0-9]"): ("falcon", ""),
}


def name_of(tokenizer: dict[str, Any]) -> str:
    """llama.cpp's name for the splits of a byte-level tokenizer.json. Raises ConversionError."""
    steps = tuple(_steps(tokenizer.get("pre_tokenizer")))
    whole_words = bool(tokenizer["model"].get("ignore_merges"))
    name = _NAMES.get(steps, ("", ""))[whole_words]
    if not name:
        raise ConversionError(
            "tokenizer.json splits texts in a way that llama.cpp has no name for: "
            + " then ".join(map(repr, steps or ("not at all",))),
            hint="the ids would differ, so it is not converted; a repository with GGUF files may exist",
        )
    return name


def _steps(step: dict[str, Any] | None) -> list[str]:
    """Each step as its pattern, or a word for what has none."""
    match step:
        case None:
            return []
        case {"type": "Sequence", "pretokenizers": [*steps]}:
            return [word for one in steps for word in _steps(one)]
        case {"type": "ByteLevel", "use_regex": False}:
            return []
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return [GPT2]
        case {"type": "Digits", "individual_digits": individual}:
            return [_DIGIT if individual else _DIGITS]
        case {"type": "Punctuation", "behavior": "Contiguous"}:
            return [_PUNCTUATION]
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated"}:
            return [pattern]
        case {
            "type": "Split",
            "pattern": {"Regex": str(pattern)},
            "behavior": "Removed",
            "invert": True,
        }:
            return [pattern]
        case _:
            return [str(step.get("type"))]
