"""Patterns against a second engine: what a grammar accepts, Python's `re` matches too."""

import itertools
import json
import random
import re

import llguidance
import pytest

from edgeinfer.errors import UnsupportedConstraintError
from edgeinfer.runtime.sampling import patterns
from edgeinfer.runtime.sampling.grammar import check_schema, schema_grammar

BYTES = llguidance.LLTokenizer("byte")
_ITEMS = r"""" \\ a b-f 0-9 / : é \n \s \d \x00-\x1f <>| ' , 一-龥""".split()
_TEXT = ['"', "\\", "a", "c", "5", "/", ":", "é", "\n", " ", "\t", "x", "<", "'", ",", "中", "😀"]
_CONTROLS = ["\x00", "\x01", "\x0b", "\x1f"]


def _class(rng: random.Random) -> str:
    return f"[{rng.choice(['^', '^', ''])}{''.join(rng.sample(_ITEMS, rng.randrange(1, 4)))}]"


def _pattern(rng: random.Random) -> str:
    atoms = [_class(rng), _class(rng), "\\S", "\\W", "\\s", ".", "x", '(?:a|[^"]|"")', "\\\\"]
    pattern = "".join(
        rng.choice(atoms) + rng.choice(["", "*", "+", "{1,3}", "?"]) for _ in range(rng.randrange(1, 4))
    )
    return f"^{pattern}$" if rng.random() < 0.8 else pattern


def _accepts(grammar: str, document: str) -> bool:
    matcher = llguidance.LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(document)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


@pytest.mark.parametrize("seed", range(150))
def test_accepted_text_matches_the_pattern(seed):
    rng = random.Random(seed)
    pattern = _pattern(rng)
    grammar = schema_grammar(check_schema({"type": "string", "pattern": pattern}))
    expected = re.compile(
        pattern.removesuffix("$") + "\\Z" if pattern.endswith("$") else pattern, re.ASCII
    )
    for _ in range(60):
        letters = _TEXT + _CONTROLS if rng.random() < 0.2 else _TEXT
        text = "".join(rng.choices(letters, k=rng.randrange(0, 5)))
        for document in {json.dumps(text), json.dumps(text, ensure_ascii=False)}:
            if _accepts(grammar, document):
                assert expected.search(text), (pattern, text)
        if expected.search(text) and not set(text) & set(_CONTROLS):
            assert _accepts(grammar, json.dumps(text, ensure_ascii=False)), (pattern, text)


@pytest.mark.parametrize("pattern", ['[^"\\p{L}]', '[^"&&a]'])
def test_class_that_cannot_be_compared_is_refused_by_place(pattern):
    with pytest.raises(UnsupportedConstraintError) as caught:
        check_schema({"properties": {"a": {"type": "string", "pattern": pattern}}})
    assert caught.value.param == "#/properties/a/pattern"


def test_look_aheads_in_the_middle_are_not_said():
    assert patterns.without_look_aheads("^a(?=b)c$") is None
    assert patterns.without_look_aheads("(?=b)c") is None
    assert patterns.without_look_aheads("^(?=a[)(]b)(?=c)d$") == ["^(?:a[)(]b)", "^(?:c)", "^d$"]
    assert patterns.without_look_aheads("^(?!ab)b$") is None
    assert patterns.without_look_aheads("^(?!-)b$") == ["^(?:[^-][\\s\\S]*)?$", "^b$"]


@pytest.mark.parametrize(
    "pattern",
    ["^(?!-)[-a-z]{1,3}$", "^(?![x-z])(?=.{2}$)[a-z]+$", "^(?!^[-+.]*$)[-+.ab]*$", "^(?!^x)[x-z]*$"],
)
def test_look_aheads_are_those_of_the_second_engine(pattern):
    grammar = schema_grammar(check_schema({"type": "string", "pattern": pattern}))
    for length in range(4):
        for letters in itertools.product("-+xabz", repeat=length):
            text = "".join(letters)
            assert _accepts(grammar, json.dumps(text)) is bool(re.search(pattern, text)), text
