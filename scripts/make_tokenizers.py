"""Train a small tokenizer of every kind, and store for tests how it encodes a thousand strings.

    env/bin/pip install tokenizers sentencepiece protobuf msgspec platformdirs
    env/bin/python scripts/make_tokenizers.py

Each tokenizer has the splits, normalizer and post-processor of the models that it represents, but a
vocabulary trained here.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path

import sentencepiece
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/made")]
import made_checkpoints as made  # noqa: E402
from nasty_strings import digest, nasty_strings  # noqa: E402

from edgeinfer.models.converting.tokenizer import CL100K, O200K, QWEN2, QWEN35, TEKKEN  # noqa: E402

SIZE = 700
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def corpus() -> list[str]:
    """Return the training texts: three documents of this repository, and 300 of the test strings."""
    texts = [
        (ROOT / "docs" / name).read_text()
        for name in ("start/first-answer.md", "guides/models.md", "concepts/scheduling.md")
    ]
    return [*texts, *nasty_strings(300)]


def byte_level(
    *steps: object, normalizer: object = None, whole: bool = False, bos: bool = False
) -> dict:
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(
        corpus(),
        trainers.BpeTrainer(
            vocab_size=SIZE,
            special_tokens=[AddedToken(word, special=True) for word in SPECIAL],
            initial_alphabet=made.byte_symbols(),
            show_progress=False,
        ),
    )
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return json.loads(tokenizer.to_str())


def split(pattern: str) -> object:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def sentence_piece(*, gemma: bool) -> dict:
    """Return the tokenizer.json of a tokenizer trained with SentencePiece."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("\n".join(corpus()))
        sentencepiece.SentencePieceTrainer.train(
            input=str(text),
            model_prefix=f"{folder}/m",
            vocab_size=SIZE,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=not gemma,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            minloglevel=2,
            character_coverage=0.99,
        )
        return _as_llama(f"{folder}/m.model", gemma=gemma)


def _as_llama(path: str, *, gemma: bool) -> dict:
    """Return a tokenizer.json with ▁ for spaces. Llama 2's, unlike Gemma's, adds ▁ before a text."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=path)
    tokens = [pieces.id_to_piece(index) for index in range(pieces.get_piece_size())]
    vocab = {token: index for index, token in enumerate(tokens)}
    ranked = []
    for token in tokens:
        if not pieces.is_byte(vocab[token]) and not pieces.is_control(vocab[token]):
            local = [
                (token[:split], token[split:])
                for split in range(1, len(token))
                if token[:split] in vocab and token[split:] in vocab
            ]
            local.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
            ranked += [(pieces.get_score(vocab[token]), pair) for pair in local]
    ranked.sort(key=lambda ranked_merge: ranked_merge[0], reverse=True)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[pair for _, pair in ranked],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps if gemma else [normalizers.Prepend("▁"), *steps])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    return json.loads(tokenizer.to_str())


def kinds() -> dict[str, dict]:
    """Return a tokenizer.json for each kind of tokenizer, by name."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return {
        "gpt2": byte_level(gpt2),
        "llama3": byte_level(split(CL100K), plain, whole=True, bos=True),
        "olmo2": byte_level(split(CL100K), plain),
        "qwen2": byte_level(split(QWEN2), plain, normalizer=normalizers.NFC()),
        "qwen35": byte_level(split(QWEN35), plain, normalizer=normalizers.NFC()),
        "tekken": byte_level(split(TEKKEN), plain, whole=True, bos=True),
        "phi4-mini": byte_level(split(O200K), plain),
        "smollm": byte_level(pre_tokenizers.Digits(individual_digits=True), gpt2),
        "llama2": sentence_piece(gemma=False),
        "gemma": sentence_piece(gemma=True),
    }


def main() -> None:
    """Write all tokenizers, and digests of the token ids, to one compressed file for the tests."""
    tokenizers = {}
    for name, tokenizer in kinds().items():
        loaded = Tokenizer.from_str(json.dumps(tokenizer))
        ids = [loaded.encode(text, add_special_tokens=False).ids for text in nasty_strings()]
        tokenizers[name] = {"tokenizer": tokenizer, "ids": [digest(tokens) for tokens in ids]}
        print(f"{name:12} {loaded.get_vocab_size()} tokens, {sum(map(len, ids))} in the strings")
    text = json.dumps(tokenizers, ensure_ascii=False, separators=(",", ":"))
    (made.GOLDEN / "tokenizers.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
