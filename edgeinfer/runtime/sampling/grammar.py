"""Constrained decoding: mask the logits of tokens that a schema or grammar forbids (llguidance).

A constraint is compiled once and cached (`Constraints`); each request gets a copy of the parser
(`TokenMatcher`). For the parser, a token is the bytes that the engine emits for it. Control tokens
match no text; grammars made here refer to them by id. See docs/decisions/030.
"""

from __future__ import annotations

import copy
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

import llguidance
import msgspec
import numpy as np
import numpy.typing as npt
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from edgeinfer.errors import UnsupportedConstraintError
from edgeinfer.runtime.requests import Choice, Constraint, Grammar, JsonSchema, Regex, check_deadline
from edgeinfer.runtime.sampling.json_schema import locate, normalise, schema_error, value_schemas

if TYPE_CHECKING:
    from edgeinfer.runtime.llama.vocab import Vocab

#: How many compiled constraints are cached. One takes about 20 KiB.
CACHE_SIZE = 128
#: Longest constraint of an answer, such as a schema or a grammar (bytes of its JSON).
MAX_SOURCE = 512 * 1024
#: JSON as `json.dumps` writes it, on one line. This style forces more tokens, and keeps a small model
#: from writing white space without end.
JSON_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
}
#: Part of llguidance's message → the message for the user.
_LIMITS = {
    "Current row has": "it allows more than 250 optional members or 1,000 continuations at one place",
    "anyOf is empty": "its `enum`, `type` or `anyOf` allows no value",
    "too many expressions": "its regular expressions are too large",
    "too many states": "its regular expressions are too large",
    "schema too large": "it is too large once references and `allOf` are merged",
    "stack level exceeded": "its references are too deep next to other keywords",
    "circular references with sibling": "it refers to itself in `allOf`, or next to other keywords",
}
_KINDS = {Regex: "regular expression", Choice: "choice", Grammar: "grammar", JsonSchema: "schema"}
#: Maximum number of digits of a number (a double has 17 significant ones), and of its exponent.
_MAX_DIGITS = 17
_EXPONENT_DIGITS = 3
_STACK_BYTES = 64 * 1024 * 1024
_stack_lock = threading.Lock()


def _limits() -> Any:
    """Return llguidance's limits, so that an ambiguous grammar fails instead of delaying requests.

    With 1,000 items per row of the parser, a token takes at most 45 ms (an optional member is four
    items). A lexer state takes 1 to 2 kB.
    """
    return llguidance.LLParserLimits(
        max_items_in_row=1000, max_lexer_states=50_000, verbose_errors=False
    )


class Lark(msgspec.Struct, frozen=True, tag="lark"):
    """A constraint made by the engine, for tool calls and reasoning: a Lark grammar for llguidance.

    The first rule is `start`. `source` refers to the other `grammars` (name, source) as `@name`.
    """

    source: str
    grammars: tuple[tuple[str, str], ...] = ()


class NumberLimit:
    """Follows one JSON answer, and forbids the tokens in `digits` once a number has 17 digits.

    An exponent may have 3 digits. A grammar does not limit digits, and at a higher temperature a model
    may never end a number: of 12 heights in metres, 4 continued `1.8000000447…` to the answer's end.
    """

    __slots__ = ("_digits", "_is_escaped", "_is_text", "_n_digits", "_vocab")

    def __init__(self, vocab: Vocab, digits: npt.NDArray[np.bool_]) -> None:
        self._vocab, self._digits = vocab, digits
        self._n_digits = 0
        self._is_text = self._is_escaped = False

    def forbid_into(self, forbidden: npt.NDArray[np.bool_]) -> None:
        """Set `forbidden` for each token in `digits` if the present number has 17 digits or more.

        If that would forbid every token, `forbidden` is not changed.
        """
        if self._n_digits >= _MAX_DIGITS:
            more = forbidden | self._digits
            if not more.all():
                np.copyto(forbidden, more)

    def accept(self, token: int) -> None:
        """Advance by the characters of `token`."""
        piece = self._vocab.piece(token)
        if self._is_text and not self._is_escaped and b'"' not in piece and b"\\" not in piece:
            return
        for character in piece:
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_text:
                self._is_escaped = character == 0x5C
                self._is_text = character != 0x22
            elif 0x30 <= character <= 0x39:
                self._n_digits += 1
            elif character == 0x22:
                self._is_text, self._n_digits = True, 0
            elif character in b"eE" and self._n_digits:
                self._n_digits = _MAX_DIGITS - _EXPONENT_DIGITS
            elif character not in b".+-":
                self._n_digits = 0


class TokenMatcher:
    """The parser of one request's constraint, at a position in its answer. Not thread-safe."""

    def __init__(
        self, matcher: Any, tokenizer: Any, n_vocab: int, numbers: NumberLimit | None = None
    ) -> None:
        self._matcher, self._n_vocab = matcher, n_vocab
        self._tokenizer, self._numbers = tokenizer, numbers
        self._mask_words = np.empty((n_vocab + 31) // 32, np.uint32)
        self._bits = self._mask_words.view(np.uint8)
        self._pointer, self._n_bytes = self._mask_words.ctypes.data, self._mask_words.nbytes

    def mask_into(self, logits: npt.NDArray[np.float32]) -> None:
        """Set the logits of forbidden tokens to -inf, in place.

        Raises UnsupportedConstraintError if the parser exceeds a limit, or allows no token.
        """
        self._matcher.unsafe_compute_mask_ptr(self._pointer, self._n_bytes)
        np.invert(self._mask_words, out=self._mask_words)
        forbidden = np.unpackbits(self._bits, count=self._n_vocab, bitorder="little").view(np.bool_)
        # after an error the parser allows the end token, which would make a broken answer look complete
        if self._matcher.is_error() or forbidden[: len(logits)].all():
            reason = _shorten(self._matcher.get_error()) or "no token is allowed here"
            raise UnsupportedConstraintError(
                f"the answer cannot continue as its schema or grammar requires: {reason}",
                param="constraint",
                hint="simplify the schema or grammar, or allow more values in it",
            )
        if self._numbers is not None:
            self._numbers.forbid_into(forbidden)
        n = min(len(logits), len(forbidden))  # a draft model's vocabulary may have another size
        np.copyto(logits[:n], -np.inf, where=forbidden[:n])
        logits[n:] = -np.inf

    def accept(self, token: int) -> bool:
        """Advance by `token`; if the constraint forbids it, change nothing and return False."""
        is_accepted = bool(self._matcher.try_consume_tokens([token]) == 1)
        if is_accepted and self._numbers is not None:
            self._numbers.accept(token)
        return is_accepted

    def copy(self) -> TokenMatcher:
        """Return a copy at the same position, in 5 µs."""
        numbers = copy.copy(self._numbers)
        return TokenMatcher(self._matcher.deep_copy(), self._tokenizer, self._n_vocab, numbers)

    def valid(self, tokens: Sequence[int]) -> int:
        """Return how many `tokens`, from the first on, the constraint allows in sequence."""
        return int(self._matcher.validate_tokens(list(tokens)))

    def forced_tokens(self) -> Sequence[int]:
        """Return the tokens that must come next, none if there is a choice."""
        return self._matcher.compute_ff_tokens()  # type: ignore[no-any-return]

    def accept_forced(self) -> list[int]:
        """Advance by the tokens that must come next, and return them."""
        return [token for token in self.forced_tokens() if self.accept(token)]

    def accept_likely(self) -> list[int]:
        """Advance by the text that must come next, and return the tokens of that text.

        The constraint allows other tokens for the same text, so the model may choose others.
        """
        text = self._matcher.compute_ff_bytes()
        tokens: list[int] = self._tokenizer.tokenize_bytes(text) if text else []
        return [token for token in tokens if self.accept(token)]

    def runs(self, tokens: Sequence[int]) -> list[list[int]]:
        """Split draft tokens into runs: a token, and the tokens that the constraint forces after it.

        The first forbidden token and all later ones are left out. Each run has all its forced tokens,
        even those that `tokens` do not contain. Takes 25 µs per run.
        """
        matcher, runs = self.copy(), list[list[int]]()
        while tokens and matcher.accept(tokens[0]):
            runs.append([tokens[0], *matcher.accept_forced()])
            n = len(runs[-1])
            tokens = tokens[n:] if list(tokens[:n]) == runs[-1] else ()
        return runs

    @property
    def is_done(self) -> bool:
        """Return whether the answer is complete, so that nothing more may follow."""
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())


class Constraints:
    """Compiles and caches constraints for one model. Thread-safe."""

    def __init__(self, cache_size: int = CACHE_SIZE) -> None:
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, bytes], TokenMatcher] = OrderedDict()
        self._cache_size = cache_size
        self._vocab: Vocab | None = None
        self._tokenizer: Any = None
        self._digits: npt.NDArray[np.bool_]  # whether each token begins with a digit

    def compile(self, constraint: Constraint | Lark, vocab: Vocab, salt: str = "") -> TokenMatcher:
        """Return a compiled constraint, of which each request uses a `copy`.

        The result is cached per `salt`, so that timing does not reveal another client's constraint.
        Raises UnsupportedConstraintError, whose `param` is the error's place in the schema or grammar.
        """
        try:
            source = msgspec.json.encode(constraint)
        except (TypeError, ValueError, RecursionError) as error:
            problem = f"the constraint cannot be written as JSON: {error}"
            raise UnsupportedConstraintError(problem, param="constraint") from error
        key = (salt, source)
        with self._lock:
            cached = self._cache.get(key) if vocab is self._vocab else None
            if cached is not None:
                self._cache.move_to_end(key)
                return cached
        if len(source) > MAX_SOURCE:
            problem = f"the schema or grammar has {len(source)} bytes; the limit is {MAX_SOURCE}"
            hint = "send a shorter schema or grammar"
            raise UnsupportedConstraintError(problem, param="constraint", hint=hint)
        tokenizer = self.token_table(vocab)
        matcher = self._build(constraint, tokenizer)
        numbers = NumberLimit(vocab, self._digits) if isinstance(constraint, JsonSchema) else None
        compiled = TokenMatcher(matcher, tokenizer, vocab.n_vocab, numbers)
        with self._lock:
            self._cache[key] = compiled
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return compiled

    def token_table(self, vocab: Vocab) -> Any:
        """Return llguidance's table of the vocabulary; making it takes 1.2 s for 262,144 tokens."""
        with self._lock:
            if self._vocab is not vocab:
                pieces = list(vocab.marked_pieces())
                self._tokenizer = llguidance.LLTokenizer.from_llamacpp(
                    tokens=pieces,
                    vocab_ptr=vocab.pointer,
                    tokenize_fptr=vocab.tokenize_address,
                    eos_token=list(vocab.eos_tokens),
                )
                digits = (piece[:1].isdigit() for piece in pieces)
                self._digits = np.fromiter(digits, np.bool_, len(pieces))
                self._vocab = vocab
                self._cache.clear()
            return self._tokenizer

    def _build(self, constraint: Constraint | Lark, tokenizer: Any) -> Any:
        if isinstance(constraint, JsonSchema):
            source, field_name = schema_grammar(check_schema(constraint.schema, tokenizer)), "#"
        else:
            source, field_name = lark_of(constraint)
        matcher = _with_deep_stack(
            lambda: llguidance.LLMatcher(tokenizer, source, log_level=0, limits=_limits())
        )
        fault = _complaint(matcher)
        if fault:
            kind = _KINDS.get(type(constraint), "constraint")
            raise UnsupportedConstraintError(
                f"the {kind} cannot be enforced: {fault}",
                param=field_name,
                hint=f"correct or simplify the {kind}",
            )
        return matcher


def check_schema(schema: Any, tokenizer: Any = None) -> dict[str, Any]:
    """Return the schema rewritten for llguidance, if it can be enforced.

    `tokenizer` is the result of `Constraints.token_table`; None checks without a vocabulary. Raises
    UnsupportedConstraintError, whose `param` is the JSON pointer of the keyword at fault.
    """
    normalised = normalise(schema)

    def complaint(subschema: dict[str, Any]) -> str:
        check_deadline()
        source = schema_grammar(subschema)
        wrong, messages = _with_deep_stack(
            lambda: llguidance.LLMatcher.validate_grammar_with_warnings(source, tokenizer)
        )
        return _shorten(messages[0]) if wrong and messages else ""

    if whole_message := complaint(normalised):
        pointer, message = _at_keyword(*locate(normalised, complaint))
        if whole_message in _LIMITS.values() and message != whole_message:
            pointer, message = "#", whole_message  # no single keyword exceeds the limit
        raise schema_error(pointer, message)
    return normalised


def _at_keyword(schema_pointer: str, message: str) -> tuple[str, str]:
    """Return the JSON pointer of the keyword that llguidance's `message` names, and a clear text."""
    if unknown := re.match(r'Unimplemented keys: \["([^"]+)"', message):
        return f"{schema_pointer}/{unknown[1]}", f"`{unknown[1]}` cannot be enforced token by token"
    if message.startswith("Resource '"):
        return f"{schema_pointer}/$ref", "references to other documents are not supported"
    if pointer := re.match(r"Pointer '(?:/\$defs/root)?(.*)' does not exist", message):
        return f"{schema_pointer}/$ref", f"#{pointer[1]} is missing, or allows no value"
    named = re.search(r"for '(\w+)'|^(\w+) must be an? \w+$|^Invalid (type)", message)
    key = named and next(filter(None, named.groups()))
    return (f"{schema_pointer}/{key}" if key and key != "schema" else schema_pointer), message


def schema_grammar(schema: dict[str, Any]) -> str:
    return str(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_STYLE))


def inline_schema(schema: Any) -> str:
    """Return a schema as a term of a Lark grammar, `%json {…}`. Raises UnsupportedConstraintError."""
    return f"%json {json.dumps({**normalise(schema), 'x-guidance': JSON_STYLE})}"


def lark_of(constraint: Constraint | Lark) -> tuple[str, str]:
    """Return a constraint as a grammar for llguidance, and the field that errors name ("pattern").

    Raises UnsupportedConstraintError if the constraint is invalid or cannot be enforced.
    """
    if isinstance(constraint, Lark):
        named = [{"name": name, "lark_grammar": text} for name, text in constraint.grammars]
        return json.dumps(
            {"grammars": [{"name": "start", "lark_grammar": constraint.source}, *named]}
        ), "constraint"
    if isinstance(constraint, JsonSchema):
        return f"start: {inline_schema(check_schema(constraint.schema))}", "#"
    if isinstance(constraint, Regex):
        grammar = json.loads(llguidance.LLMatcher.grammar_from_regex(whole(constraint.pattern)))
        return str(grammar["grammars"][0]["lark_grammar"]), "pattern"
    if isinstance(constraint, Choice):
        if not constraint.options or not all(constraint.options):
            problem = "an option is empty" if constraint.options else "there are no options"
            hint = 'give the possible answers as texts: ["yes", "no"]'
            raise UnsupportedConstraintError(f"choice: {problem}", param="options", hint=hint)
        # write all options as one terminal: alternatives of a rule count against the parser's limit
        return "start: OPTION\nOPTION: " + " | ".join(map(quote, constraint.options)), "options"
    return to_lark(constraint.gbnf), "gbnf"


def lark_parts(constraint: Constraint | Lark) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return a constraint as `source` and `grammars` of a Lark. Raises UnsupportedConstraintError."""
    if isinstance(constraint, Lark):
        return constraint.source, constraint.grammars
    return lark_of(constraint)[0], ()


def whole(pattern: str) -> str:
    """Return `pattern` without `^` at its start and `$` at its end, unless it contains `|`.

    Patterns match the whole answer anyway, and llguidance has no anchors.
    """
    bare = pattern
    if "|" not in pattern:
        bare = bare.removeprefix("^")
        if bare.endswith("$") and (len(bare) - 1 - len(bare[:-1].rstrip("\\"))) % 2 == 0:
            bare = bare[:-1]
    return bare


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _complaint(matcher: Any) -> str:
    """Return the error of a compiled grammar in one line; "" if some answer satisfies it."""
    if not matcher.is_error() and not any(matcher.compute_bitmask()):
        return _shorten(matcher.get_error()) or "no value satisfies it"
    return _shorten(matcher.get_error()) if matcher.is_error() else ""


def _shorten(error: str) -> str:
    for sign, text in _LIMITS.items():
        if sign in error:
            return text
    error = error.partition("<state>")[0].partition("while processing json-schema")[0]
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return " ".join(lines).removesuffix("<non-verbose/>")[:300]


def _with_deep_stack(work: Callable[[], Any]) -> Any:
    """Run `work` on a thread with a 64 MiB stack. llguidance recurses along references (3 KiB each)."""
    with ThreadPoolExecutor(1, "edgeinfer-compile") as pool:
        with _stack_lock:
            before = threading.stack_size(_STACK_BYTES)
            try:
                future = pool.submit(work)
            finally:
                threading.stack_size(before)
        return future.result()


#: Matches `\uXXXX` and `\UXXXXXXXX` whose backslash is not escaped itself.
_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")


def to_lark(gbnf: str) -> str:
    r"""Convert a grammar in llama.cpp's notation (GBNF) to Lark.

    Escapes such as `"\u00e9"` are replaced first, because llguidance's converter refuses them. Raises
    UnsupportedConstraintError for an invalid grammar; its `param` has the line ("gbnf line 3").
    """
    try:
        text = str(any_to_lark(_ESCAPE.sub(_resolve, gbnf)))
        text.encode()  # an error if the grammar has half of a surrogate pair
    except Exception as error:
        param = "gbnf"
        if isinstance(error, GbnfToLarkError):
            line = error.pos.text.count("\n", 0, error.pos.pos) + 1
            param = f"gbnf line {line}"
        raise UnsupportedConstraintError(
            f"the grammar is invalid: {error}",
            param=param,
            hint='correct the grammar; this one is valid: root ::= "yes" | "no"',
        ) from error
    return text


def _resolve(escape: re.Match[str]) -> str:
    code = int(escape[2] or escape[3], 16)
    return escape[1] + (f"\\x{code:02x}" if code < 0x80 else chr(code))


def follows(value: Any, schema: dict[str, Any]) -> bool:
    """Return whether a schema allows a JSON value.

    Raises UnsupportedConstraintError if the schema cannot be enforced.
    """
    matcher = llguidance.LLMatcher(_bytes(), schema_grammar(check_schema(schema)), log_level=0)
    text = json.dumps(_in_order(value, [schema], schema), ensure_ascii=False)
    tokens = _bytes().tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


@cache
def _bytes() -> Any:
    return llguidance.LLTokenizer("byte")


def _in_order(value: Any, schemas: list[Any], root: dict[str, Any]) -> Any:
    """Return `value` with its properties in the schema's order, because the grammar allows no other."""
    parts = list(value_schemas(schemas, root))
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [
            _in_order(element, [p for s in parts for p in _of_item(s, n)], root)
            for n, element in enumerate(value)
        ]
    if not isinstance(value, dict):
        return value
    names = dict.fromkeys(
        n for key in ("properties", "required") for s in parts for n in s.get(key, ())
    )
    ordered = dict.fromkeys([*(n for n in names if n in value), *value])
    return {n: _in_order(value[n], [p for s in parts for p in _of_member(s, n)], root) for n in ordered}


def _of_item(schema: dict[str, Any], n: int) -> Iterator[Any]:
    first, items = schema.get("prefixItems", ()), schema.get("items")
    if isinstance(items, list):
        first, items = items, schema.get("additionalItems")
    yield first[n] if n < len(first) else items


def _of_member(schema: dict[str, Any], name: str) -> Iterator[Any]:
    properties = schema.get("properties", {})
    yield properties[name] if name in properties else schema.get("additionalProperties")
    yield from schema.get("patternProperties", {}).values()
