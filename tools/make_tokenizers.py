"""Train a small tokenizer of every kind, and keep what `tokenizers` makes of a thousand strings, for the tests.

    env/bin/pip install tokenizers sentencepiece protobuf msgspec platformdirs
    env/bin/python tools/make_tokenizers.py

Each has the splits, normalizer and post-processor of the models it stands for; the vocabulary is ours.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import unicodedata
from pathlib import Path

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
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
    """Texts of this repository, and the strings themselves."""
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


def sentence_piece(kind: str, *, gemma: bool = False) -> dict:
    """Trained by SentencePiece, converted by transformers as the makers do."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("\n".join(corpus()))
        rules = {"normalization_rule_name": "identity"}
        if kind != "bpe":
            rules = {"normalization_rule_tsv": str(_compatibility(Path(folder)))}
        sentencepiece.SentencePieceTrainer.train(
            input=str(text),
            model_prefix=f"{folder}/m",
            vocab_size=SIZE,
            model_type=kind,
            byte_fallback=kind == "bpe",
            **rules,
            remove_extra_whitespaces=kind != "bpe",
            add_dummy_prefix=not gemma,
            allow_whitespace_only_pieces=kind == "bpe",
            split_digits=kind == "bpe",
            minloglevel=2,
            character_coverage=0.99,
        )
        if kind != "bpe":
            return _as_xlm_roberta(Path(f"{folder}/m.model"))
        return _as_llama(f"{folder}/m.model", gemma=gemma)


def _compatibility(folder: Path) -> Path:
    """The rules of NFKC for the characters of the strings: the whole table takes 100 KB."""
    chars = sorted({char for text in nasty_strings() for char in text} | set("\t\n\r"))
    rows = [(char, " " if char.isspace() else unicodedata.normalize("NFKC", char)) for char in chars]
    lines = [
        f"{ord(char):X}\t{' '.join(f'{ord(one):X}' for one in whole)}"
        for char, whole in rows
        if char != whole
    ]
    place = folder / "rules.tsv"
    place.write_text("\n".join(lines) + "\n")
    return place


def _as_llama(path: str, *, gemma: bool) -> dict:
    """tokenizer.json as Llama 2's (a space before, spaces as ▁) or Gemma's (only the latter)."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=path)
    tokens = [pieces.id_to_piece(index) for index in range(pieces.get_piece_size())]
    vocab = {token: index for index, token in enumerate(tokens)}
    ranked = []
    for token in tokens:
        if not pieces.is_byte(vocab[token]) and not pieces.is_control(vocab[token]):
            local = [
                (token[:at], token[at:])
                for at in range(1, len(token))
                if token[:at] in vocab and token[at:] in vocab
            ]
            local.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
            ranked += [(pieces.get_score(vocab[token]), pair) for pair in local]
    ranked.sort(key=lambda one: one[0], reverse=True)
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


def _as_xlm_roberta(path: Path) -> dict:
    """tokenizer.json of a Unigram model: the normalizer's table as it is, words marked by ▁."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(path.read_bytes())
    vocab = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocab += [(piece.piece, piece.score) for piece in proto.pieces[3:]]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=3, byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    return json.loads(tokenizer.to_str())


def word_piece() -> dict:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        corpus(),
        trainers.WordPieceTrainer(vocab_size=SIZE, special_tokens=special, show_progress=False),
    )
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return json.loads(tokenizer.to_str())


def kinds() -> dict[str, dict]:
    """A tokenizer.json for each row."""
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
        "falcon": byte_level(
            pre_tokenizers.Punctuation("contiguous"),
            gpt2,
            pre_tokenizers.Digits(individual_digits=False),
            split("[0-9][0-9][0-9]"),
        ),
        "llama2": sentence_piece("bpe"),
        "gemma": sentence_piece("bpe", gemma=True),
        "bert": word_piece(),
        "xlm-roberta": sentence_piece("unigram"),
    }


def main() -> None:
    """Write one compressed file."""
    kept = {}
    for name, tokenizer in kinds().items():
        loaded = Tokenizer.from_str(json.dumps(tokenizer))
        ids = [loaded.encode(text, add_special_tokens=False).ids for text in nasty_strings()]
        kept[name] = {"tokenizer": tokenizer, "ids": [digest(one) for one in ids]}
        print(f"{name:12} {loaded.get_vocab_size()} tokens, {sum(map(len, ids))} in the strings")
    text = json.dumps(kept, ensure_ascii=False, separators=(",", ":"))
    (made.GOLDEN / "tokenizers.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
