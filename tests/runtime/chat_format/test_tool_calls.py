"""Calls and reasoning out of a stream: the same events however the text is cut, and nothing lost."""

import itertools
import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.runtime.chat_format.answer_parser import AnswerParser
from edgeinfer.runtime.chat_format.reasoning import SPANS, THINK, detect, is_open
from edgeinfer.runtime.chat_format.tool_call_formats import FAMILIES, HERMES, hold_back, split_at_marker
from edgeinfer.runtime.chat_format.tool_call_formats import detect as detect_format
from edgeinfer.runtime.chat_format.tool_call_grammar import write_call
from edgeinfer.runtime.chat_format.tool_call_parser import call_id, python_calls
from edgeinfer.runtime.events import ReasoningDelta, TextDelta, ToolCallDelta

NAMES = {"get_weather": {"properties": {"city": {"type": "string"}}}, "add": {}}
Said = tuple[str, str] | tuple[str, int, str, str]


def gather(events) -> list[Said]:
    """Events with neighbours of one kind joined: ("text", …), ("thought", …), ("call", index, name,
    arguments).
    """
    said: list[Said] = []
    for event in events:
        if isinstance(event, ToolCallDelta):
            if event.name:
                said.append(("call", event.index, event.name, ""))
            kind, index, name, arguments = said[-1]
            said[-1] = (kind, index, name, arguments + event.arguments)
            assert index == event.index
        else:
            kind = "text" if isinstance(event, TextDelta) else "thought"
            assert event.text
            if said and said[-1][0] == kind:
                said[-1] = (kind, said[-1][1] + event.text)
            else:
                said.append((kind, event.text))
    return said


def read(family: str, *chunks: str, certain: bool = False) -> list[Said]:
    parser = AnswerParser(FAMILIES[family], NAMES, constrained=certain)
    events = [event for chunk in chunks for event in parser.feed(chunk)]
    return gather([*events, *parser.finish()])


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(p % (len(text) + 1) for p in places), len(text)]
    return [text[i:j] for i, j in itertools.pairwise(bounds)]


PARIS = ("call", 0, "get_weather", '{"city": "Paris"}')
#: A family, an answer in its notation, and what is parsed of it.
CALLS: list[tuple[str, str, list[Said]]] = [
    (example["family"], example["answer"], [tuple(said) for said in example["parsed"]])
    for example in tomllib.loads(Path(__file__).with_name("tool_calls.toml").read_text())["call"]
]
TEXTS = [
    ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": oops}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add"'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>'),
    ("hermes", "a <tool_call> b"),
    ("hermes", "almost <tool"),
    ("hermes", " \n hello \n "),
    ("hermes", '{"name": "add", "arguments": {}}'),
    ("llama", '{"answer": 42}'),
    ("llama", '{"name": "Bob", "age": 3}'),
    ("llama", "[1, 2, 3]"),
    ("llama", "  [ ] "),
    ("llama", "<|python_tag|>import os"),
    ("llama", "{"),
    ("mistral", "[TOOL_CALLS] x"),
    ("mistral", "Hi [TOOL"),
    ("mistral-args", "[TOOL_CALLS]nobody[ARGS]{}"),
    ("mistral-args", "[TOOL_CALLS]add[ARGS]nonsense"),
    ("mistral-args", "[TOOL_CALLS]" + "x" * 400),
    ("phi", "functional programming"),
    ("gemma", '```json\n{"x": 1}\n```'),
    ("gemma", "```python\nprint(1)\n```"),
    ("gemma", "```tool_code\nimport os\n```"),
    ("gemma", "```tool_code\n__import__('os').system('x')\n```"),
    ("generic", '```json\n{"name": "nobody"}\n```'),
    ("hermes", "<tool_call>\n</tool_call>\n"),
    ("generic", "```json```"),
    ("qwen-xml", "<tool_call><function=nobody></function></tool_call>"),
    ("qwen-xml", "<tool_call><function=add>junk</function></tool_call>"),
    ("lfm", "<|tool_call_start|>[add(1)]<|tool_call_end|>"),
]


@pytest.mark.parametrize(("family", "text", "expected"), CALLS)
def test_calls_are_read(family, text, expected):
    assert read(family, text) == expected
    assert read(family, *text) == expected
    if all(said[0] == "call" for said in expected) and "{}" not in text and "<function" not in text:
        assert read(family, *text, certain=True) == expected


@pytest.mark.parametrize(("family", "text"), TEXTS)
def test_non_calls_come_back_as_text(family, text):
    assert read(family, text) == [("text", text)]
    assert read(family, *text) == [("text", text)]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([(f, t) for f, t, _ in CALLS] + TEXTS), st.lists(st.integers(0, 400), max_size=12)
)
def test_call_events_do_not_depend_on_chunks(case, places):
    family, text = case
    assert read(family, *cut(text, places)) == read(family, text)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), st.text(), st.lists(st.integers(0, 400), max_size=6))
def test_text_without_markers_goes_through_unchanged(family, text, places):
    if split_at_marker(text, FAMILIES[family].begin)[1]:
        return
    assert read(family, *cut(text, places)) == ([("text", text)] if text else [])


_LITERALS = sorted(
    {literal for form in FAMILIES.values() for literal in (*form.literals, *form.name_ends)}
)
_PIECES = ('{"name": "add"', ', "arguments": {"a": 1}}', "add", "add(a=1)", "```", *'{}[]"\\\n é<,')
_FRAGMENTS = st.sampled_from([*_LITERALS, *_PIECES])


@settings(max_examples=500, deadline=None)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.lists(_FRAGMENTS, max_size=14),
    st.lists(st.integers(0, 400), max_size=8),
)
def test_rubbish_parses_alike_in_any_chunks_and_loses_no_text(family, fragments, places):
    text = "".join(fragments)
    whole = read(family, text)
    assert read(family, *cut(text, places)) == whole
    if all(said[0] == "text" for said in whole):
        assert "".join(said[1] for said in whole) == text
    for said in whole:
        if said[0] == "call":
            assert isinstance(json.loads(said[3]), dict)


def test_certain_call_streams_its_arguments():
    parser = AnswerParser(HERMES, NAMES, constrained=True)
    chunks = ['<tool_call>\n{"name": "add", "argum', 'ents": {"a"', ": 1", "0}", "}\n</tool_call>"]
    seen = [parser.feed(chunk) for chunk in chunks]
    arguments = [[e.arguments for e in events if not e.name] for events in seen]
    assert arguments == [[], ['{"a"'], [": 1"], ["0}"], []]
    assert seen[1][0].name == "add"
    assert parser.finish() == []


def test_cut_certain_call_is_not_text():
    parser = AnswerParser(HERMES, NAMES, constrained=True)
    parser.feed('<tool_call>\n{"name": "add", "arguments": {"a"')
    assert parser.finish() == []


def test_call_ids_are_unique_and_of_the_familys_form():
    assert len({call_id() for _ in range(1000)}) == 1000
    short = call_id(short=True)
    assert len(short) == 9
    assert short.isalnum()
    parser = AnswerParser(HERMES, NAMES)
    events = [*parser.feed(CALLS[1][1]), *parser.finish()]
    assert len({event.id for event in events if isinstance(event, ToolCallDelta) and event.id}) == 2


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_written_call_parses(family):
    text = write_call(FAMILIES[family], "get_weather", '{"city": "Paris"}')
    assert read(family, text) == [PARIS]


def test_python_is_parsed_and_never_run():
    arguments = '{"a": 1, "b": "x", "c": [true, null]}'
    assert python_calls("add(a=1, b='x', c=[True, None])") == [("add", arguments)]
    literals = ("add(1)", "add(**x)", "add(a=open('/etc/passwd'))", "1", "add(a=b)", "")
    for code in (*literals, "(" * 10_000, "x" * 30_000):
        assert python_calls(code) is None


def test_partial_markers_are_held_back():
    assert hold_back("text <tool_", ("<tool_call>",)) == ("text ", "<tool_")
    assert hold_back("text <tool_call>", ("<tool_call>",)) == ("text <tool_call>", "")
    assert split_at_marker("a ```json b", ("```", "```json")) == ("a ", "```json", " b")
    assert split_at_marker("a ``", ("```",)) == ("a ", "", "``")


def test_families_are_detected_by_their_templates():
    assert detect_format("… <tool_call> … </tool_call>")[0].name == "hermes"
    assert detect_format("<tool_call><function=x><parameter=y></tool_call>")[0].name == "qwen-xml"
    assert detect_format("<|tool_call_start|>")[0].name == "lfm"
    assert detect_format("[TOOL_CALLS] [ARGS]")[0].name == "mistral-args"
    assert detect_format("[TOOL_CALLS]")[0].name == "mistral"
    assert detect_format("<|start_header_id|> <|python_tag|>")[0].name == "llama"
    assert detect_format("<|tool|>")[0].name == "phi"
    assert detect_format("", architecture="gemma3")[0].name == "gemma"
    assert detect_format("", name="Mistral-7B")[0].name == "mistral"
    assert detect_format("<|im_start|>")[0].name == "generic"


# reasoning


def think(*chunks: str, span=THINK, family="hermes", tools=(), opened=False) -> list[Said]:
    parser = AnswerParser(FAMILIES[family], dict(tools), span=span, opened=opened)
    events = [event for chunk in chunks for event in parser.feed(chunk)]
    return gather([*events, *parser.finish()])


THOUGHTS = [
    ("<think>\nhm, so\n</think>\n\nYes.", False, [("thought", "hm, so"), ("text", "Yes.")]),
    ("  <think>a</think>b", False, [("thought", "a"), ("text", "b")]),
    ("<think>\n\n</think>\n\nYes.", False, [("text", "Yes.")]),
    ("so\n</think>\n\nYes. ", True, [("thought", "so"), ("text", "Yes. ")]),
    ("<think>never closed </thin", False, [("thought", "never closed </thin")]),
    ("Yes, <think>no</think>", False, [("text", "Yes, <think>no</think>")]),
    ("<thin", False, [("text", "<thin")]),
    (" \n", False, [("text", " \n")]),
    ("only thought", True, [("thought", "only thought")]),
    ("<think>a  b\n\nc</think>", False, [("thought", "a  b\n\nc")]),
]


@pytest.mark.parametrize(("text", "opened", "expected"), THOUGHTS)
def test_reasoning_is_split_off(text, opened, expected):
    assert think(text, opened=opened) == expected
    assert think(*text, opened=opened) == expected


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(THOUGHTS), st.lists(st.integers(0, 60), max_size=8))
def test_reasoning_events_do_not_depend_on_chunks(case, places):
    text, opened, expected = case
    assert think(*cut(text, places), opened=opened) == expected


@settings(max_examples=200, deadline=None)
@given(st.text(), st.lists(st.integers(0, 60), max_size=5))
def test_text_without_reasoning_goes_through_unchanged(text, places):
    if text.lstrip().startswith("<think>"):
        return
    assert think(*cut(text, places)) == ([("text", text)] if text else [])


@pytest.mark.parametrize("span", SPANS, ids=lambda span: span.open)
def test_every_span_parses_and_is_detected(span):
    assert think(f"{span.open}hm{span.close}Yes.", span=span) == [("thought", "hm"), ("text", "Yes.")]
    assert detect(f"… {span.open} … {span.close}") == (span, True)
    assert is_open(f"prompt {span.open}\n", span)
    assert not is_open(f"{span.open}\n\n{span.close}\n\n", span)


def test_final_channel_holds_the_answer_alone():
    assert think(*"<|channel|>final<|message|>Yes.", span=SPANS[-1]) == [("text", "Yes.")]


def test_call_after_reasoning_parses():
    text = "<think>Paris it is.</think>\n\n" + CALLS[0][1]
    assert think(*text, tools=NAMES) == [("thought", "Paris it is."), PARIS]


def test_think_span_is_the_default():
    assert detect("{{ messages }}") == (THINK, False)
    events = AnswerParser(HERMES, {}, span=THINK).feed("no")
    assert not any(isinstance(event, ReasoningDelta) for event in events)
