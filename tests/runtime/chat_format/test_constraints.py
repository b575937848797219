"""Constrained decoding: what a mask allows validates, and what cannot be enforced is refused with
its place.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from generated_schemas import schema as generated
from generated_schemas import wild

from edgeinfer.errors import InvalidRequestError, UnsupportedConstraintError
from edgeinfer.runtime.requests import (
    Choice,
    Constraint,
    GenerateRequest,
    Grammar,
    JsonSchema,
    Message,
    Regex,
    Sampling,
    limit_preparation,
)
from edgeinfer.runtime.sampling.grammar import Constraints, check_schema, follows, schema_grammar, whole
from edgeinfer.runtime.sampling.json_schema import locate, normalise

from ..conftest import answer, answers
from .conftest import allowed_tokens, draw_text

DEEP: dict[str, Any] = {"type": "string"}
for _ in range(80):
    DEEP = {"type": "array", "items": DEEP}

#: "refused": (pointer, schema); "rewritten": (schema, a document that it allows, one that it forbids).
SCHEMAS = json.loads(Path(__file__).with_name("schemas.json").read_text())
REFUSED, REWRITTEN = SCHEMAS["refused"], SCHEMAS["rewritten"]


def refusal(constraints: Constraints, vocab: Any, constraint: Constraint) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        constraints.compile(constraint, vocab)
    return caught.value


@pytest.mark.parametrize(("pointer", "schema"), REFUSED.values(), ids=REFUSED.keys())
def test_unenforceable_schema_is_refused_by_place(constraints, vocab, schema, pointer):
    error = refusal(constraints, vocab, JsonSchema(schema))
    assert isinstance(error, UnsupportedConstraintError)
    assert error.param == pointer
    assert pointer in error.message


def chain(length: int, link: Any, last: Any = True) -> dict[str, Any]:
    """A schema of `length` definitions, each made by `link` of a reference to the next."""
    definitions = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(length)}
    return {"$defs": {**definitions, f"a{length}": last}, "$ref": "#/$defs/a0"}


DOUBLING = {
    "properties": lambda ref: {
        "type": "object",
        "properties": {"x": ref, "y": ref},
        "required": ["x", "y"],
    },
    "allOf": lambda ref: {"allOf": [ref, ref]},
    "anyOf": lambda ref: {"anyOf": [ref, ref]},
    "minItems": lambda ref: {"type": "array", "items": ref, "minItems": 2},
    "prefixItems": lambda ref: {"type": "array", "prefixItems": [ref, ref], "minItems": 2},
}


@pytest.mark.parametrize("link", DOUBLING.values(), ids=DOUBLING.keys())
def test_doubling_references_to_false_are_refused(constraints, vocab, link):
    with limit_preparation(5):
        error = refusal(constraints, vocab, JsonSchema(chain(40, link, False)))
    assert error.param.startswith("#/$defs/a39/")
    assert "schema is false" in error.message


@pytest.mark.parametrize("link", [lambda ref: ref, *DOUBLING.values()])
def test_chain_of_3000_references_compiles(constraints, vocab, link):
    with limit_preparation(10):
        constraints.compile(JsonSchema(chain(3000, link, {"type": "integer"})), vocab)


@pytest.mark.parametrize("draft", [{}, {"$schema": "http://json-schema.org/draft-04/schema#"}])
def test_refusal_names_the_true_cause_beside_references(draft):
    """A definition that is there was called missing, in place of what could not be enforced."""
    tags = {"type": "array", "items": {"$ref": "#/definitions/tag"}, "uniqueItems": True}
    definitions = {"tag": {"type": "string"}, "tags": tags}
    members = {"ok": {"$ref": "#/definitions/tag"}, "tags": {"$ref": "#/definitions/tags"}}
    with pytest.raises(UnsupportedConstraintError) as caught:
        check_schema({**draft, "type": "object", "properties": members, "definitions": definitions})
    assert caught.value.param == "#/definitions/tags/uniqueItems"


def test_circle_beside_other_keywords_is_named_as_such():
    circle = {"type": "object", "properties": {"n": {"$ref": "#/$defs/a", "required": ["n"]}}}
    with pytest.raises(UnsupportedConstraintError) as caught:
        check_schema({"$ref": "#/$defs/a", "$defs": {"a": circle}})
    assert "it refers to itself" in caught.value.message


def test_compilation_ends_at_its_deadline(constraints, vocab):
    with limit_preparation(0):
        error = refusal(constraints, vocab, JsonSchema({"type": "null", "title": "deadline"}))
    assert "processor time" in error.message


def test_locate_names_the_root_at_its_deadline():
    schema = {"properties": {"a": {"type": "integer", "minimum": 5, "maximum": 1}}}
    assert locate(schema, lambda schema_part: "wrong") == ("#/properties/a", "wrong")
    assert locate(schema, lambda schema_part: "wrong", seconds=-1) == ("#", "wrong")


@pytest.mark.parametrize(("schema", "good", "bad"), REWRITTEN.values(), ids=REWRITTEN.keys())
def test_rewritten_schema_allows_and_forbids_as_the_original(constraints, vocab, schema, good, bad):
    compiled = constraints.compile(JsonSchema(schema), vocab)
    for document, allowed in ((good, True), (bad, False)):
        if document is None:
            continue
        matcher = compiled.copy()
        is_accepted = all(matcher.accept(token) for token in vocab.tokenize(json.dumps(document)))
        assert (is_accepted and (matcher.is_done or matcher.accept(vocab.eos_tokens[0]))) is allowed
    is_old = "dependencies" in schema
    validator = jsonschema.Draft7Validator if is_old else jsonschema.Draft202012Validator
    for seed in range(20):
        text = draw_text(constraints, vocab, JsonSchema(schema), seed, limit=200)
        if text is not None and "$id" not in schema:
            validator(schema).validate(json.loads(text))


def test_overlapping_one_of_parts_are_named(constraints, vocab):
    parts = [{"type": "string"}, {"type": "integer"}, {"type": "number"}]
    message = refusal(constraints, vocab, JsonSchema({"oneOf": parts})).message
    assert "schemas 1 and 2 may both match a value" in message
    assert "coerce" not in message


def _alternatives(rng: random.Random) -> dict[str, Any]:
    """A `oneOf` of two or three small parts; some of them overlap."""
    parts = []
    for _ in range(rng.randrange(2, 4)):
        name, other = rng.sample("kzw", 2)
        value = {"const": rng.randrange(4)}
        parts.append(
            rng.choice(
                [
                    {"type": "object", "properties": {name: value}, "required": [name]},
                    {"type": "object", "required": [other]},
                    {"type": rng.choice(["integer", "number", "string", "boolean", "null"])},
                    {"enum": rng.sample([1, 2, "a", None], 2)},
                    {"required": [name]},
                ]
            )
        )
    return {"oneOf": parts}


def _is_enforced(schema: dict[str, Any]) -> bool:
    try:
        normalise(schema)
    except UnsupportedConstraintError:
        return False
    return True


def test_verdict_on_a_one_of_does_not_depend_on_others():
    rng = random.Random(1)
    verdicts = set()
    for _ in range(4000):
        x, y = _alternatives(rng), _alternatives(rng)
        both = {"type": "object", "properties": {"x": x, "y": y}, "required": ["x", "y"]}
        assert _is_enforced(both) is (_is_enforced(x) and _is_enforced(y)), both
        verdicts.add(_is_enforced(both))
    assert verdicts == {True, False}


@pytest.mark.parametrize(
    "constraint", [Regex("(x{1,100}){1,100}"), JsonSchema({"pattern": "(x{1,100}){1,100}"})]
)
def test_grammar_engine_limit_has_a_plain_error(constraints, vocab, constraint):

    def follow() -> None:
        matcher = constraints.compile(constraint, vocab).copy()
        for token in vocab.tokenize('"' + "x" * 300):
            matcher.mask_into(np.zeros(vocab.n_vocab, np.float32))
            matcher.accept(token)

    with pytest.raises(UnsupportedConstraintError) as caught:
        follow()
    assert "its regular expressions are too large" in caught.value.message


def test_oversized_schema_is_refused(constraints, vocab):
    many = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(30_000)}}
    for schema in (DEEP, many):
        assert isinstance(refusal(constraints, vocab, JsonSchema(schema)), UnsupportedConstraintError)


@pytest.mark.parametrize(
    ("constraint", "param"),
    [
        (Regex("("), "pattern"),
        (Regex("a(?=b)"), "pattern"),
        (Choice(()), "options"),
        (Choice(("a", "")), "options"),
        (Grammar('start ::= "a"'), "gbnf"),
        (Grammar('root ::= "a" (\n"b"'), "gbnf line 2"),
        (Grammar('root ::= "a" nowhere'), "gbnf"),
        (Grammar('root ::= "\\ud800"'), "gbnf"),
    ],
)
def test_invalid_constraints_are_refused_before_decoding(constraints, vocab, constraint, param):
    assert refusal(constraints, vocab, constraint).param == param


def test_dead_end_raises_instead_of_masking_everything(constraints, vocab):
    matcher = constraints.compile(Choice(("yes",)), vocab).copy()
    matcher._matcher.consume_token(vocab.tokenize("no")[0])  # an error that llguidance never leaves
    with pytest.raises(UnsupportedConstraintError):
        matcher.mask_into(np.zeros(vocab.n_vocab, np.float32))


def test_ambiguous_grammar_ends_its_own_request(constraints, vocab):
    rule = " ".join(["root"] * 8)  # a token of it adds eight ways: the limit is near
    matcher = constraints.compile(Grammar(f'root ::= {rule} | "a" | ""'), vocab).copy()
    (a,) = vocab.tokenize("a")

    def go_on() -> None:
        logits = np.zeros(vocab.n_vocab, np.float32)
        for _ in range(800):
            matcher.mask_into(logits)
            matcher.accept(a)

    with pytest.raises(UnsupportedConstraintError) as caught:
        go_on()
    assert not matcher.is_done
    assert "1,000 continuations" in caught.value.message


def test_large_constraints_stay_within_the_limits(constraints, vocab):
    options = tuple(f"option {i}" for i in range(1000))
    members = {f"p{i}": {"type": "integer", "maximum": 9, "minimum": 0} for i in range(300)}
    kind = CLOSED | {"required": ["kind"]}
    kinds = [kind | {"properties": {"kind": {"const": f"k{i}"}}} for i in range(300)]
    for constraint in (
        Choice(options),
        JsonSchema({"type": "object", "properties": members, "additionalProperties": False}),
        JsonSchema({"anyOf": kinds}),
    ):
        assert draw_text(constraints, vocab, constraint, 1, limit=4000)


def valid(schema: dict[str, Any], text: str) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.validate(json.loads(text), schema, format_checker=checker)


@pytest.mark.parametrize("seed", range(100))
def test_random_walks_validate(constraints, vocab, seed):
    schema = generated(seed)
    text = draw_text(constraints, vocab, JsonSchema(schema), seed)
    valid(schema, text)


@pytest.mark.parametrize("padding", [-300, 0, 300])
def test_draft_model_with_fewer_or_more_tokens_gets_the_same_mask(constraints, vocab, padding):
    matcher = constraints.compile(JsonSchema({"enum": ["yes", "no"]}), vocab).copy()
    logits, expected = (np.zeros(vocab.n_vocab + n, np.float32) for n in (padding, 0))
    matcher.copy().mask_into(expected)
    matcher.mask_into(logits)
    n = min(len(logits), len(expected))
    assert (logits[:n] == expected[:n]).all()
    assert (logits[n:] == -np.inf).all()
    with pytest.raises(UnsupportedConstraintError):
        matcher.mask_into(np.zeros(1, np.float32))


@pytest.mark.parametrize("seed", range(30))
def test_drafts_are_split_as_the_engine_takes_their_tokens(constraints, vocab, seed):
    """A token is sampled and those that it forces are taken, wherever a draft is cut or leaves them."""
    rng = random.Random(seed)
    schema = JsonSchema(generated(seed))
    matcher, runs = constraints.compile(schema, vocab).copy(), []
    matcher.accept_forced()
    start = matcher.copy()
    while not matcher.is_done and len(runs) < 40:
        token = rng.choice(allowed_tokens(matcher, vocab))
        if not matcher.accept(token):
            break  # a digit beyond the limit of numbers
        runs.append([token, *matcher.forced_tokens()])
        assert matcher.accept_forced() == runs[-1][1:]
    tokens = [token for run in runs for token in run]
    ends = np.cumsum([len(run) for run in runs])
    for n in range(len(tokens) + 1):
        n_begun = int(np.searchsorted(ends, n)) + 1 if n else 0
        assert start.runs(tokens[:n]) == runs[:n_begun]
        if n and n not in ends:
            assert start.runs([*tokens[:n], tokens[n] + 1, *tokens[n + 1 :]]) == runs[:n_begun]


@pytest.mark.parametrize("seed", range(30))
def test_likely_tokens_spell_the_text_that_must_come_next(constraints, vocab, seed):
    """Every token that is allowed instead begins with this text, or is the beginning of it."""
    rng, n_likely = random.Random(seed), 0
    matcher = constraints.compile(JsonSchema(generated(seed)), vocab).copy()
    for _ in range(60):
        matcher.accept_forced()
        if matcher.is_done:
            break
        allowed = allowed_tokens(matcher, vocab)
        likely = matcher.copy().accept_likely()
        text = b"".join(vocab.piece(token) for token in likely)
        pieces = [vocab.piece(token, special=True) for token in allowed]
        assert all(piece.startswith(text) or text.startswith(piece) for piece in pieces)
        assert not likely or matcher.valid(likely) == len(likely)
        n_likely += len(likely)
        if not matcher.accept(likely[0] if likely else rng.choice(allowed)):
            break  # a digit beyond the limit of numbers
    assert n_likely or seed


def test_wild_schemas_are_refused_or_validate(constraints, vocab):
    validated = refused = 0
    for seed in range(400):
        schema = wild(seed)
        try:
            text = draw_text(constraints, vocab, JsonSchema(schema), seed)
        except UnsupportedConstraintError:
            refused += 1
            continue
        if text is not None:
            valid(schema, text)
            validated += 1
    assert validated > 250
    assert refused > 20


def test_random_walks_validate_with_a_sentencepiece_vocabulary(big_vocab):
    constraints = Constraints()
    for seed in range(20):
        schema = generated(seed)
        text = draw_text(constraints, big_vocab, JsonSchema(schema), seed)
        valid(schema, text)


def test_random_walks_choose(constraints, vocab):
    options = ("yes", "yes please", 'no "thanks"', "größer", "a\nb")
    seen = {draw_text(constraints, vocab, Choice(options), seed) for seed in range(60)}
    assert seen <= set(options)
    assert len(seen) > 2


#: A constraint, and the expression that all it allows matches.
EXPRESSIONS = [
    *((Regex(p), p) for p in ("(red|green) (fox|hen)", "[^a-z\n]{4}", "ü+/é{2}", "a|b")),
    (Regex("^[A-Z]{3}-\\d{2}$"), "[A-Z]{3}-\\d{2}"),
    (Grammar('root ::= "a" ("b" | "c")+ "\\x21"'), r"a[bc]+!"),
    (Grammar('root ::= item{2,3}\nitem ::= [0-9] "-"? # digits'), r"(\d-?){2,3}"),
    (Grammar('root ::= "\\u00e9\\"" [\\u00e0-\\u00e5]'), r'é"[à-å]'),
    (Grammar('root ::= "x\\x01y"'), "x\x01y"),
    (Grammar('root ::= "\\\\x41"'), r"\\x41"),
    (Grammar('root ::= "(" root ")" | "."'), r"\(*\.\)*"),
]


@pytest.mark.parametrize(("constraint", "pattern"), EXPRESSIONS)
def test_random_walks_match_the_expression(constraints, vocab, constraint, pattern):
    for seed in range(5):
        text = draw_text(constraints, vocab, constraint, seed)
        assert text is None or re.fullmatch(pattern, text)


CLOSED = {"type": "object", "additionalProperties": False}
ANNOTATED = {"title": "t", "format": "int32", "x-guidance": {"lenient": True}, "default": "odd"}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (ANNOTATED | {"type": "integer", "minimum": 7, "maximum": 7}, "7"),
        (CLOSED | {"properties": {"a": {"const": None}}, "required": ["a"]}, '{"a": null}'),
        (
            CLOSED
            | {"properties": {"a": {"const": 1}, "b": {"const": [1, 2]}}, "required": ["a", "b"]},
            '{"a": 1, "b": [1, 2]}',
        ),
    ],
    ids=["annotations restrict nothing", "const null restricts", "one line"],
)
def test_schema_of_one_document_draws_its_text(constraints, vocab, schema, text):
    assert draw_text(constraints, vocab, JsonSchema(schema), 0) == text


def _longest_draw(constraints, vocab, schema: dict[str, Any], *, favoured: bytes) -> str:
    """A text that goes on with a `favoured` character where it may."""
    matcher = constraints.compile(JsonSchema(schema), vocab).copy()
    text = b""
    for _ in range(200):
        allowed = allowed_tokens(matcher, vocab)
        liked = [token for token in allowed if len(vocab.piece(token)) == 1]
        liked = [token for token in liked if vocab.piece(token) in favoured] or liked or allowed
        if liked[0] in vocab.eos_tokens or not matcher.accept(liked[0]):
            break
        text += vocab.piece(liked[0])
        if matcher.is_done:
            break
    return text.decode()


@pytest.mark.parametrize("kind", ["number", "integer"])
@pytest.mark.parametrize("favoured", [b"7", b".7", b"e7", b"-7"])
def test_numbers_end_after_17_digits(constraints, vocab, kind, favoured):
    schema = CLOSED | {"properties": {"a": {"type": kind}}, "required": ["a"]}
    text = _longest_draw(constraints, vocab, schema, favoured=favoured)
    assert text.endswith("}")
    assert len(text) < 40
    json.loads(text)


def test_digits_of_texts_and_of_needed_numbers_go_on(constraints, vocab):
    long = {"type": "string", "pattern": "^7{40}$"}
    schema = CLOSED | {"properties": {"a": long, "n": {"const": 10**25}}, "required": ["a", "n"]}
    text = _longest_draw(constraints, vocab, schema, favoured=b"7")
    assert json.loads(text) == {"a": "7" * 40, "n": 10**25}


def test_refused_token_changes_nothing(constraints, vocab):
    matcher = constraints.compile(Choice(("yes", "no")), vocab).copy()
    (no,) = vocab.tokenize("no")
    (yes,) = vocab.tokenize("yes")
    assert matcher.accept(no)
    assert not matcher.accept(yes)
    assert matcher.is_done


def test_end_token_is_allowed_once_the_output_may_end(constraints, vocab):
    matcher = constraints.compile(Choice(("yes", "yes please")), vocab).copy()
    assert matcher.accept(*vocab.tokenize("yes"))
    assert set(vocab.eos_tokens) <= set(allowed_tokens(matcher, vocab))
    assert not matcher.is_done


def test_control_tokens_match_no_constraint(constraints, vocab):
    matcher = constraints.compile(Regex("(?s:.*)"), vocab).copy()
    allowed = set(allowed_tokens(matcher, vocab))
    assert not any(map(vocab.is_control, allowed.difference(vocab.eos_tokens)))


def test_compiled_constraints_are_cached_by_salt_and_the_oldest_evicted(vocab):
    constraints, integer = Constraints(cache_size=2), JsonSchema({"type": "integer"})
    first = constraints.compile(integer, vocab, "a")
    assert constraints.compile(integer, vocab, "a") is first
    assert constraints.compile(integer, vocab, "b") is not first
    constraints.compile(Regex("b"), vocab)
    assert constraints.compile(integer, vocab, "a") is not first


def test_anchors_are_stripped_only_around_the_whole_pattern():
    assert whole("^a$") == "a"
    assert whole("^a\\$") == "a\\$"
    assert whole("^a\\\\$") == "a\\\\"
    assert whole("^a|b$") == "^a|b$"


def _run(engine: Any, constraints: list[Constraint]) -> list[tuple[str, str]]:
    messages = (Message(role="user", content="Answer in the form that was asked for."),)
    requests = []
    for seed, constraint in enumerate(constraints):
        hot = Sampling(temperature=1.5, top_k=0, top_p=1, min_p=0, seed=seed)
        asked = {"constraint": constraint, "max_tokens": 300, "sampling": hot}
        requests.append(GenerateRequest(messages=messages, **asked))
    results = answers(engine, requests)
    assert all(result.finish.timings.constraint_ms > 0 for result in results)
    return [(result.text, result.finish.reason) for result in results]


@pytest.mark.model
def test_model_at_a_high_temperature_follows_its_schemas(smol, cases):
    schemas = [generated(seed) for seed in range(cases(100))]
    answers = []
    for start in range(0, len(schemas), 25):
        answers += _run(smol, [JsonSchema(s) for s in schemas[start : start + 25]])
    pairs = zip(schemas, answers, strict=True)
    finished = [(schema, text) for schema, (text, reason) in pairs if reason == "stop"]
    # max_tokens cuts the rest; a batch's rounding depends on its members
    assert len(finished) >= 0.9 * len(schemas)
    for schema, text in finished:
        valid(schema, text)
    assert all(reason == "length" for _, reason in answers if reason != "stop")


@pytest.mark.model
def test_answer_cut_by_max_tokens_ends_with_length(smol):
    schema = JsonSchema({"type": "array", "items": {"type": "integer"}, "minItems": 50})
    request = GenerateRequest(prompt="List: ", constraint=schema, max_tokens=5)
    assert answer(smol, request).finish.reason == "length"


def _draw(rng: random.Random, schema: dict) -> object:
    """A value of the schema: a walk through its grammar."""
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), schema_grammar(check_schema(schema)))
    text = bytearray()
    while not matcher.is_stopped() and not (matcher.is_accepting() and rng.random() < 0.3):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        every = np.flatnonzero(bits[32:256]) + 32
        allowed = [token for token in every if token < 128] or list(every)
        ends = [token for token in allowed if chr(token) in '"}],']
        token = int(rng.choice(ends if ends and rng.random() < 0.5 else allowed))
        assert matcher.consume_token(token)
        text.append(token)
    return json.loads(text)


def _shuffle(rng: random.Random, value: object) -> object:
    if isinstance(value, dict):
        return {name: _shuffle(rng, value[name]) for name in rng.sample(list(value), len(value))}
    return [_shuffle(rng, element) for element in value] if isinstance(value, list) else value


def _change(rng: random.Random, value: object) -> object:
    """The value with something removed, added or replaced."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name, way = rng.choice(list(value)), rng.random()
        if way < 0.3:
            return {other: value[other] for other in value if other != name}
        return {**value, **({"extra": 1} if way < 0.5 else {name: _change(rng, value[name])})}
    if isinstance(value, list) and value and rng.random() < 0.7:
        index = rng.randrange(len(value))
        return [*value[:index], _change(rng, value[index]), *value[index + 1 :]]
    return rng.choice([None, True, 3, -7, 2.5, 4.0, "red", "x", [], {}])


@pytest.mark.parametrize("seed", range(40))
def test_verdicts_are_those_of_jsonschema(seed: int) -> None:
    rng, schema = random.Random(seed), generated(seed)
    oracle = jsonschema.Draft202012Validator(schema)
    value = _draw(rng, schema)
    for document in (value, _shuffle(rng, value)):
        assert follows(document, schema) is oracle.is_valid(document) is True
    if '"format"' not in json.dumps(schema):  # the oracle takes it for an annotation
        for _ in range(10):
            document = _change(rng, _shuffle(rng, value))
            assert follows(document, schema) is oracle.is_valid(document)


def test_members_are_found_behind_references_and_alternatives() -> None:
    member_schema = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b", "a"]}
    schema = {"$defs": {"p": member_schema}, "anyOf": [{"type": "null"}, {"$ref": "#/$defs/p"}]}
    assert follows({"b": 1, "a": {"z": 1.0}}, schema)
    assert follows(None, schema)
    assert not follows({"b": 1}, schema)
    assert follows({"extra": 1, "a": 1, "b": 2}, member_schema)
    with pytest.raises(UnsupportedConstraintError):
        follows(1, {"$ref": "https://example.org/schema"})
