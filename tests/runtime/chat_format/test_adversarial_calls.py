"""Arguments that show calls: no call is lost, cut or invented, however the stream is split."""

import itertools
import json
import random
from typing import Any

import pytest
from made_formats import json_or_text

from edgeinfer.runtime.chat_format.answer_parser import AnswerParser
from edgeinfer.runtime.chat_format.parameters import parameter_kinds, typed_value
from edgeinfer.runtime.chat_format.reasoning import THINK
from edgeinfer.runtime.chat_format.tool_call_formats import FAMILIES
from edgeinfer.runtime.chat_format.tool_call_grammar import write_call
from edgeinfer.runtime.events import ReasoningDelta, TextDelta, ToolCallDelta

TEXT = {"type": "string"}
TOOLS: dict[str, Any] = {
    "write_file": {"properties": {"path": TEXT, "content": TEXT}, "required": ["path", "content"]},
    "edit": {"properties": {"old": TEXT, "n": {"type": "integer"}, "new": TEXT}},
    "ping": {"properties": {}},
}
MARKERS = sorted(
    {text for form in FAMILIES.values() for text in (*form.literals, *form.name_ends)}
    | {"<function=write_file>", "<parameter=path>", "</parameter>", "</function>", "</think>", "```"}
)
WORDS = ["end", "a < b", "é", '"q"', "\\", "\n", "{", "}", "it's", "123", "null", "\n\n", " "]
SHOWN = {"path": "/etc/x", "content": "y"}


def value(rng: random.Random, depth: int = 0) -> str:
    """A text with markers, words between them, and whole calls."""
    parts = []
    for _ in range(rng.randrange(1, 6)):
        kind = rng.random()
        if kind < 0.5:
            parts += [rng.choice(MARKERS), rng.choice(["x", " and ", "\nso "])]
        elif kind < 0.65 and not depth:
            form = FAMILIES[rng.choice(sorted(FAMILIES))]
            parts += [write_call(form, "write_file", json.dumps(SHOWN)), "\ndone"]
        else:
            parts.append(rng.choice(WORDS))
    return "".join(parts)


def arguments(rng: random.Random, name: str) -> dict[str, Any]:
    if name == "write_file":
        return {"path": rng.choice(["a", "b/c.md"]), "content": value(rng)}
    return {"old": value(rng), "n": rng.randrange(100), "new": value(rng)} if name == "edit" else {}


def write_as(family: str, name: str, args: dict[str, Any]) -> str:
    """A call as the family writes it."""
    if family in ("lfm", "gemma"):
        code = f"{name}({', '.join(f'{key}={item!r}' for key, item in args.items())})"
        form = FAMILIES[family]
        begin = form.begin[0]
        return f"{begin}[{code}]{form.end}" if family == "lfm" else f"{begin}\n{code}\n```"
    return write_call(FAMILIES[family], name, json.dumps(args, ensure_ascii=False))


def read(
    family: str, pieces: list[str], *, cut: bool = False, **options: Any
) -> tuple[str, str, list[Any]]:
    """Return text, reasoning and calls; arguments that are no JSON stay a text."""
    parser = AnswerParser(FAMILIES[family], TOOLS, **options)
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish(cut=cut)
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    thought = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    calls: list[list[Any]] = []
    for event in events:
        if isinstance(event, ToolCallDelta):
            if event.name:
                calls.append([event.name, ""])
            assert event.index == len(calls) - 1
            calls[-1][1] += event.arguments
    return text, thought, [(name, json_or_text(sent)) for name, sent in calls]


def splits(text: str, rng: random.Random) -> list[list[str]]:
    """The text whole, by characters, in two at places, and in random pieces."""
    variants = [[text], list(text), [text[i : i + 3] for i in range(0, len(text), 3)]]
    places = range(len(text)) if len(text) < 120 else rng.sample(range(len(text)), 24)
    variants += [[text[:length], text[length:]] for length in places]
    for _ in range(5):
        cuts = [0, *sorted(rng.choices(range(len(text) + 1), k=9)), len(text)]
        variants.append([text[i:j] for i, j in itertools.pairwise(cuts)])
    return variants


NOTATIONS = sorted(set(FAMILIES) - {"generic"})


@pytest.mark.parametrize("family", NOTATIONS)
def test_arguments_with_every_marker_are_forwarded_whole(family):
    rng = random.Random(f"adversarial {family}")
    for _ in range(56):
        name = rng.choice(["write_file", "write_file", "edit"])
        args = arguments(rng, name)
        text = write_as(family, name, args)
        expected = ("", "", [(name, args)])
        for pieces in splits(text, rng):
            assert read(family, pieces) == expected, (text, pieces)


def test_opener_alone_in_a_text_does_not_take_the_closer_of_the_text():
    args = {"old": "<parameter=path> and", "n": 85, "new": '"q"'}
    text = write_as("qwen-xml", "edit", args)
    for pieces in splits(text, random.Random(1)):
        assert read("qwen-xml", pieces) == ("", "", [("edit", args)])


@pytest.mark.parametrize("family", NOTATIONS)
def test_several_calls_after_words_are_all_forwarded(family):
    rng = random.Random(f"several {family}")
    form = FAMILIES[family]
    if form.bare:
        return  # the first call is the whole answer, or a fence each
    for _ in range(20):
        n_calls = rng.randrange(1, 4)
        calls = [("write_file", {"path": "a", "content": f"x{i} < y"}) for i in range(n_calls)]
        text = "I'll do it.\n" + "\n".join(write_as(family, *call) for call in calls)
        for pieces in splits(text, rng)[:40]:
            said, _, passed = read(family, pieces)
            assert (said.strip(), passed) == ("I'll do it.", calls), text


@pytest.mark.parametrize("family", NOTATIONS)
def test_cut_call_is_never_whole(family):
    rng = random.Random(f"cut {family}")
    for _ in range(12):
        args = arguments(rng, "write_file")
        text = write_as(family, "write_file", args)
        for length in rng.sample(range(len(text)), min(50, len(text))):
            for constrained in (False, True):
                _, _, calls = read(family, [text[:length]], cut=True, constrained=constrained)
                for _, passed in calls:
                    assert passed == args or isinstance(passed, str), (text[:length], passed)


XML = "<tool_call>\n<function=write_file>\n{}</function>\n</tool_call>"
PATH = "<parameter=path>\n*.md\n</parameter>\n"
LENIENT = {
    "no opener": f"I'll use it.\n\n<function=write_file>\n{PATH}</function>\n</tool_call>",
    "no opener, no closer": f"<function=write_file>\n{PATH}</function>",
    "no closer of the parameter": XML.format("<parameter=path>\n*.md\n"),
    "no closer of the function": f"<tool_call>\n<function=write_file>\n{PATH}</tool_call>",
    "no closer of the call": f"<tool_call>\n<function=write_file>\n{PATH}</function>",
    "no closers": f"<tool_call>\n<function=write_file>\n{PATH}",
    "half a closer": f"<tool_call>\n<function=write_file>\n{PATH}</function>\n</tool_",
    "quotes": XML.replace("=write_file", '="write_file"').format(PATH.replace("=path", '="path"')),
    "JSON": '<tool_call>{"name": "write_file", "arguments": {"path": "*.md"}}</tool_call>',
    "on one line": "<tool_call><function=write_file><parameter=path>*.md</parameter></function></tool_call>",
    "two functions in a call": XML.format(PATH).replace(
        "</function>", "</function>\n<function=ping>\n</function>"
    ),
    "words after it": XML.format(PATH) + "\n\nThat was it.",
    "a closer too many": XML.format(PATH) + "\n</tool_call>",
}


@pytest.mark.parametrize("answer", LENIENT.values(), ids=LENIENT.keys())
def test_lax_calls_of_the_xml_notation_are_read(answer):
    for pieces in splits(answer, random.Random(1)):
        _, _, calls = read("qwen-xml", pieces)
        assert calls[0] == ("write_file", {"path": "*.md"}), pieces
        assert calls[1:] == ([("ping", {})] if "ping" in answer else [])


NO_CALLS = [
    "Write `<function=write_file>` to begin it.",
    "```xml\n<function=write_file>\n<parameter=path>\na\n</parameter>\n</function>\n```",
    "<function=nobody>\n<parameter=path>\na\n</parameter>\n</function>",
    "A block ends with </tool_call> or </parameter>.",
    "<tool_call>",
    "<tool_call>\n<function=write_file>",
]


@pytest.mark.parametrize("answer", NO_CALLS)
def test_text_about_calls_stays_text(answer):
    for pieces in splits(answer, random.Random(1)):
        assert read("qwen-xml", pieces) == (answer, "", [])


@pytest.mark.parametrize("family", NOTATIONS)
@pytest.mark.parametrize("opened", [True, False])
def test_call_before_the_end_of_reasoning_ends_it(family, opened):
    if FAMILIES[family].bare:
        return
    args = {"path": "a", "content": "ends with </think> or so"}
    call = write_as(family, "write_file", args)
    answer = f"{'' if opened else '<think>'}I should write.\n\n{call}"
    for pieces in splits(answer, random.Random(1)):
        answer_read = read(family, pieces, span=THINK, opened=opened)
        assert answer_read == ("", "I should write.", [("write_file", args)])


def test_reasoning_about_calls_goes_on():
    answer = "I could say <tool_call>\n{} or <function=write_file> here.</think>\n\nNo."
    for pieces in splits(answer, random.Random(1)):
        said, thought, calls = read("qwen-xml", pieces, span=THINK, opened=True)
        assert (said, calls) == ("No.", [])
        assert thought == "I could say <tool_call>\n{} or <function=write_file> here."


def test_long_text_is_streamed_as_it_comes():
    parser = AnswerParser(FAMILIES["qwen-xml"], TOOLS)
    opening = "<tool_call>\n<function=write_file>\n<parameter=content>\n"
    assert [event for event in parser.feed(opening) if isinstance(event, ToolCallDelta)]
    sent = "".join(event.arguments for _ in range(50) for event in parser.feed("ten chars "))
    assert len(sent) > 450


#: (schema of a parameter, value as written, value as forwarded)
TYPED = [
    ({"anyOf": [TEXT, {"type": "null"}]}, "123", "123"),
    ({"anyOf": [TEXT, {"type": "null"}]}, "null", None),
    ({"anyOf": [TEXT, {"type": "null"}]}, "nullable", "nullable"),
    ({"type": ["string", "null"]}, "None", None),
    ({"$ref": "#/$defs/text"}, "123", "123"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"const": "1"}, "1", "1"),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "false", False),
    ({"type": ["integer", "null"]}, "None", None),
    ({"type": "integer"}, "7", 7),
    ({"type": "integer"}, "7.0", 7),
    ({"type": "integer"}, "seven", "seven"),
    ({"type": "number"}, "7.5", 7.5),
    ({"type": ["number", "string"]}, "7.5", 7.5),
    ({"oneOf": [{"type": "integer"}, TEXT]}, "007", "007"),
    ({"type": "array"}, "['a', True]", ["a", True]),
    ({"type": "array"}, '["a", 1]', ["a", 1]),
    ({"type": "object"}, "{'a': None}", {"a": None}),
    ({"allOf": [{"type": "object"}]}, '{"a": {"b": 1}}', {"a": {"b": 1}}),
    (TEXT, '"quoted"', '"quoted"'),
    (TEXT, "null", "null"),
    (TEXT, '{"a": 1}', '{"a": 1}'),
    ({}, "12", 12),
    ({}, "plain words", "plain words"),
    (True, "[1]", [1]),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "number"}, "1e999", "1e999"),
    ({"type": ["string", "integer"]}, "9" * 80, "9" * 80),
]


@pytest.mark.parametrize(("schema", "text", "expected"), TYPED)
def test_values_have_the_types_of_the_schema(schema, text, expected):
    tool = {"properties": {"x": schema}, "$defs": {"text": TEXT}}
    assert json.loads(typed_value(text, parameter_kinds(tool, "x"))) == expected or len(text) > 64
    parameter = f"<parameter=x>\n{text}\n</parameter>"
    answer = f"<tool_call>\n<function=f>\n{parameter}\n</function>\n</tool_call>"
    for pieces in ([answer], list(answer)):
        parser = AnswerParser(FAMILIES["qwen-xml"], {"f": tool})
        events = [event for piece in pieces for event in parser.feed(piece)] + list(parser.finish())
        sent = "".join(event.arguments for event in events if isinstance(event, ToolCallDelta))
        assert json.loads(sent) == {"x": expected}
        assert type(json.loads(sent)["x"]) is type(expected)


@pytest.mark.parametrize("kind", ["integer", "array", "object", "boolean"])
def test_empty_value_that_is_no_text_is_left_out(kind):
    tool = {"properties": {"x": {"type": kind}, "y": TEXT}}
    answer = "<tool_call><function=f><parameter=x>\n</parameter><parameter=y></parameter></function>"
    parser = AnswerParser(FAMILIES["qwen-xml"], {"f": tool})
    events = [*parser.feed(answer), *parser.finish()]
    sent = "".join(event.arguments for event in events if isinstance(event, ToolCallDelta))
    assert json.loads(sent) == {"y": ""}
