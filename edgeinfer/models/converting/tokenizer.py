"""Convert tokenizer.json to the keys that llama.cpp reads from a GGUF.

Two kinds are supported: byte-level BPE, and SentencePiece's BPE with byte fallback (Llama 2, Gemma).
llama.cpp knows a fixed set of patterns that split text before BPE, each named after a model that used
it (`llama-vocab.cpp`). The patterns in tokenizer.json decide which name is used, never the model's
name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import TokenType

from edgeinfer.errors import ConversionError
from edgeinfer.models.converting.checkpoint import read_json
from edgeinfer.runtime.normalizing import NFC, NORMALIZER_KEY

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_SLASH_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

#: Regex by which a ByteLevel step splits text. tokenizer.json names the step without the regex.
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

#: Regexes of the steps that split text → llama.cpp's names for this pre-tokenizer: without and with
#: `ignore_merges` (a word that is a token is not built by merges); "" if llama.cpp has none. O200K is
#: the regex of Granite's tokenizer; llama.cpp's "gpt-4o" differs: it leaves combining marks out.
_PRE_TOKENIZERS: dict[tuple[str, ...], tuple[str, str]] = {
    (GPT2,): ("gpt-2", ""),
    (CL100K,): ("dbrx", "llama-bpe"),
    (QWEN2,): ("qwen2", ""),
    (QWEN35,): ("qwen35", ""),
    (TEKKEN,): ("", "tekken"),
    (O200K,): ("granite-embed-multi-97m", "granite-embed-multi-97m"),
    (_DIGIT, GPT2): ("smollm", ""),
}


def pre_tokenizer_name(tokenizer: dict[str, Any]) -> str:
    """Return llama.cpp's name for how tokenizer.json splits text. Raises ConversionError."""
    steps = tuple(_steps(tokenizer.get("pre_tokenizer")))
    whole_words = bool(tokenizer["model"].get("ignore_merges"))
    name = _PRE_TOKENIZERS.get(steps, ("", ""))[whole_words]
    if not name:
        raise ConversionError(
            "llama.cpp does not support the pre-tokenizer of tokenizer.json: "
            + " then ".join(map(repr, steps or ("none",))),
            hint="look for a repository with GGUF files; a conversion would produce wrong token ids",
        )
    return name


def _steps(step: dict[str, Any] | None) -> list[str]:
    """Return the patterns of a step that splits text, or the type of a step that is unknown."""
    match step:
        case None:
            return []
        case {"type": "Sequence", "pretokenizers": [*steps]}:
            return [word for substep in steps for word in _steps(substep)]
        case {"type": "ByteLevel", "use_regex": False}:
            return []
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return [GPT2]
        case {"type": "Digits", "individual_digits": True}:
            return [_DIGIT]
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": str(kind)} if (
            kind == "Isolated" or (kind == "Removed" and step.get("invert") is True)
        ):
            return [pattern]
        case _:
            return [str(step.get("type"))]


Values = dict[str, Any]

_FORM = NORMALIZER_KEY.removeprefix("tokenizer.")
#: Special token in tokenizer_config.json → key in the GGUF.
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}


class Vocabulary:
    """Tokens with their types and scores, by id. Ids without a token are unused padding."""

    def __init__(self, size: int) -> None:
        self.tokens = [f"[PAD{index}]" for index in range(size)]
        self.types = [TokenType.UNUSED] * size
        self.scores = [-1000.0] * size

    def set_token(self, index: int, token: str, kind: TokenType, score: float = -1000.0) -> None:
        """Set the token with the id `index`. Raises ConversionError if the id is out of range."""
        if not 0 <= index < len(self.tokens):
            bound = f"config.json says {len(self.tokens)} tokens"
            raise ConversionError(f"tokenizer.json gives {token!r} the id {index}, but {bound}")
        self.tokens[index] = token
        self.types[index] = kind
        self.scores[index] = score


def metadata(folder: Path, n_vocab: int) -> Values:
    """Return a checkpoint's GGUF metadata under `tokenizer.`, by key; the keys lack this prefix.

    `n_vocab` is the number of tokens in config.json. Raises ConversionError.
    """
    tokenizer = read_json(folder / "tokenizer.json")
    if not isinstance(tokenizer.get("model"), dict):
        hint = "create it: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        raise ConversionError(f"{folder} has no tokenizer.json", hint=hint)
    vocabulary = Vocabulary(n_vocab)
    keys = _model(tokenizer, vocabulary)
    _added_tokens(tokenizer, vocabulary)
    keys |= {"ggml.tokens": vocabulary.tokens, "ggml.token_type": vocabulary.types}
    if keys["ggml.model"] == "llama":
        keys["ggml.scores"] = vocabulary.scores
    return keys | _specials(folder, tokenizer) | _template(folder)


def _model(tokenizer: Values, vocabulary: Vocabulary) -> Values:
    model = tokenizer["model"]
    kind = model.get("type") or ("BPE" if "merges" in model else "")
    if kind != "BPE":
        raise ConversionError(f"tokenizer.json has a {kind!r} tokenizer; only BPE is supported")
    steps = f"{tokenizer.get('pre_tokenizer')}{tokenizer.get('decoder')}"
    return (_byte_level if "'ByteLevel'" in steps else _sentence_piece)(tokenizer, vocabulary)


def _merges(model: Values) -> list[tuple[str, str]]:
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
    return [(first, second) for first, second in pairs]


def _byte_level(tokenizer: Values, vocabulary: Vocabulary) -> Values:
    model = tokenizer["model"]
    for token, index in model["vocab"].items():
        vocabulary.set_token(index, token, TokenType.NORMAL)
    # a space separates the two tokens of a merge, so a space inside a token is written as Ġ
    merges = [" ".join(part.replace(" ", "Ġ") for part in pair) for pair in _merges(model)]
    pre = pre_tokenizer_name(tokenizer)
    keys: Values = {"ggml.model": "gpt2", "ggml.pre": pre, "ggml.merges": merges}
    normalizer = (tokenizer.get("normalizer") or {}).get("type")
    if normalizer == "NFC":
        keys[_FORM] = NFC
    elif normalizer:
        raise ConversionError(f"tokenizer.json has the normalizer {normalizer}, which llama.cpp lacks")
    return keys


def _sentence_piece(tokenizer: Values, vocabulary: Vocabulary) -> Values:
    """Add the tokens of a SentencePiece vocabulary; return its keys.

    llama.cpp merges the pair with the highest score first, so a score is minus the rank of the merge.
    """
    model = tokenizer["model"]
    rank: dict[str, int] = {}
    for index, (first, second) in enumerate(_merges(model)):
        rank.setdefault(first + second, index)
    unknown = model.get("unk_token")
    for token, index in model["vocab"].items():
        if token == unknown:
            vocabulary.set_token(index, token, TokenType.UNKNOWN, 0.0)
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            vocabulary.set_token(index, token, TokenType.BYTE, 0.0)
        else:
            vocabulary.set_token(index, token, TokenType.NORMAL, -float(rank.get(token, len(rank))))
    return {"ggml.model": "llama", "ggml.pre": "default", "ggml.add_space_prefix": _prefixes(tokenizer)}


def _prefixes(tokenizer: Values) -> bool:
    steps = f"{tokenizer.get('normalizer')}{tokenizer.get('pre_tokenizer')}"
    metaspace = "'Metaspace'" in steps and "'prepend_scheme': 'never'" not in steps
    return metaspace or "'Prepend'" in steps


def _added_tokens(tokenizer: Values, vocabulary: Vocabulary) -> None:
    """Add tokens that are recognized before text is split, such as special tokens, to `vocabulary`."""
    for token in tokenizer.get("added_tokens") or ():
        index = token["id"]
        if index < len(vocabulary.types) and vocabulary.types[index] == TokenType.UNKNOWN:
            continue
        kind = TokenType.CONTROL if token.get("special") else TokenType.USER_DEFINED
        vocabulary.set_token(index, token["content"], kind)


def _specials(folder: Path, tokenizer: Values) -> Values:
    added = tokenizer.get("added_tokens") or ()
    ids = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in added}
    config = read_json(folder / "config.json")
    special = read_json(folder / "special_tokens_map.json")
    special |= read_json(folder / "tokenizer_config.json")
    special = {"unk_token": tokenizer["model"].get("unk_token")} | special
    keys: Values = {}
    for word, key in _SPECIAL.items():
        token = special.get(word)
        text = token.get("content") if isinstance(token, dict) else token
        index = ids.get(text) if isinstance(text, str) else config.get(f"{word}_id")
        if isinstance(index, list):
            index = index[0] if index else None
        if isinstance(index, int):
            keys[f"ggml.{key}"] = index
    adds_bos, adds_eos = _adds_bos_eos(tokenizer.get("post_processor"))
    if adds_bos is None and isinstance(special.get("add_bos_token"), bool):
        adds_bos = special["add_bos_token"]
    return keys | {"ggml.add_bos_token": bool(adds_bos), "ggml.add_eos_token": bool(adds_eos)}


def _adds_bos_eos(step: Values | None) -> tuple[bool | None, bool | None]:
    """Return whether BOS goes before a text and EOS after it; None if the file does not say."""
    if step is None:
        return None, None
    if step["type"] == "Sequence":
        frames = [_adds_bos_eos(frame) for frame in step["processors"]]
        return next((frame for frame in frames if frame != (None, None)), (None, None))
    if step["type"] == "TemplateProcessing":
        pieces = step["single"]
        return "SpecialToken" in pieces[0], "SpecialToken" in pieces[-1]
    return None, None


def _template(folder: Path) -> Values:
    template_file = folder / "chat_template.jinja"
    if template_file.is_file():
        return {"chat_template": template_file.read_text("utf-8")}
    template = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        template = {entry.get("name"): entry.get("template") for entry in entries}.get("default")
    return {"chat_template": template} if isinstance(template, str) and template else {}
