"""From a request to a prompt, a constraint and a parser: the engine's way into templates, tool formats
and reasoning.
"""

import json
from typing import Any

import jsonschema
import pytest
from made_formats import FAMILY_TEMPLATES, load_format, template_text
from msgspec.structs import replace

from edgeinfer.errors import InvalidRequestError, ModelLoadError, UnsupportedConstraintError
from edgeinfer.runtime.chat_format.chat_format import ProcessedChat, unenforced_fields
from edgeinfer.runtime.chat_format.tool_call_formats import FAMILIES
from edgeinfer.runtime.chat_format.tool_call_grammar import write_call
from edgeinfer.runtime.events import Finished, ReasoningDelta, TextDelta, ToolCallDelta
from edgeinfer.runtime.requests import (
    Choice,
    GenerateRequest,
    JsonSchema,
    Message,
    Regex,
    Sampling,
    Tool,
    ToolCall,
    ToolChoice,
    check_request,
)
from edgeinfer.runtime.sampling.grammar import Constraints, Lark, TokenMatcher

from .conftest import draw_text

USER = (Message(role="user", content="Weather in Paris?"),)
SYSTEM = Message(role="system", content="Be brief.")
WEATHER = Tool(
    name="get_weather",
    description="The weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
PING = Tool(name="ping")
ODD = Tool(
    name="odd",
    parameters={"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
)


def request_of(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"messages": USER, **fields})


def process(name: str, vocab: Any = None, **fields: Any) -> ProcessedChat:
    return load_format(name, vocab).process(request_of(**fields))


def choose(mode: str) -> ToolChoice:
    return ToolChoice(mode=mode, name="get_weather" if mode == "named" else "")


def refusal(name: str, **fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        process(name, **fields)
    return caught.value


def parse(parser: Any, text: str) -> list[Any]:
    return [*parser.feed(text), *parser.finish()]


def matcher_after(
    constraints: Constraints, vocab: Any, constraint: Any, text: str
) -> TokenMatcher | None:
    """The constraint's matcher after a text that it allows; None if it forbids one of the tokens."""
    matcher = constraints.compile(constraint, vocab).copy()
    return matcher if all(map(matcher.accept, vocab.tokenize(text))) else None


def test_plain_chat_has_a_parser_and_no_constraint():
    chat = process("qwen25")
    assert chat.prompt.endswith("<|im_start|>assistant\n")
    assert chat.constraint is None
    assert chat.stop == ()
    assert not chat.parser.special_tokens
    assert list(chat.parser.feed("Hello")) == [TextDelta("Hello")]


def test_continued_user_turn_takes_no_answer():
    check_request(request_of(messages=USER, continue_final=True, max_tokens=0), 100)
    with pytest.raises(InvalidRequestError) as caught:
        check_request(request_of(messages=USER, continue_final=True, max_tokens=1), 100)
    assert caught.value.param == "messages"


def test_a_request_has_at_most_8192_messages():
    check_request(request_of(messages=USER * 8192), 100)
    with pytest.raises(InvalidRequestError, match=r"^messages: at most 8,192 messages are allowed$"):
        check_request(request_of(messages=USER * 8193), 100)


def test_base_model_continues_a_transcript():
    chat_format = load_format()
    chat = chat_format.process(request_of())
    assert chat.prompt == "<s>User: Weather in Paris?\nAssistant:"
    assert "\nUser:" in chat.stop
    assert chat.parser is None
    assert chat_format.tool_format == ""
    assert "base model" in chat_format.reason


def test_choices_are_reported_with_reasons():
    chosen = load_format("qwen3").choices
    names = ("chat_template", "tool_format", "reasoning")
    assert [chosen[name].value for name in names] == ["own", "hermes", "<think>"]
    assert "<tool_call>" in chosen["tool_format"].reason
    assert load_format().choices["chat_template"].value == "transcript"


def test_template_for_tools_is_used_with_tools_alone():
    chat_format = load_format("smollm2", tool_template=template_text("qwen_xml"))
    assert chat_format.tool_format == "qwen-xml"
    assert "<function=NAME>" in chat_format.process(request_of(tools=(WEATHER,))).prompt
    none = request_of(tools=(WEATHER,), tool_choice=ToolChoice(mode="none"))
    for request in (request_of(), none):
        assert chat_format.process(request).prompt == load_format("smollm2").process(request).prompt
    call = write_call(FAMILIES["qwen-xml"], "get_weather", '{"city": "Rome"}')
    events = parse(chat_format.process(request_of(tools=(WEATHER,))).parser, call)
    assert events[0].name == "get_weather"


def test_bos_is_added_if_the_model_wants_it_and_the_template_lacks_it():
    assert load_format("qwen25", add_bos=True).render(request_of()).startswith("<s><|im_start|>")
    assert load_format("qwen25").render(request_of()).startswith("<|im_start|>")
    assert load_format("llama31", add_bos=True).render(request_of()).count("<s>") == 1


def test_broken_template_is_a_load_error_with_a_hint():
    with pytest.raises(ModelLoadError) as caught:
        load_format(template="{% if %}")
    assert "models.toml" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": ToolChoice(mode="required")}, "tool_choice"),
        ({"tools": (WEATHER,), "tool_choice": ToolChoice(mode="named", name="pong")}, "tool_choice"),
        ({"tools": (WEATHER, WEATHER)}, "tools[1].name"),
        ({"tools": (Tool(name=""),)}, "tools[0].name"),
        ({"tools": (Tool(name="a\nb"),)}, "tools[0].name"),
        ({"tools": tuple(Tool(name=f"t{i}") for i in range(200))}, "tools"),
    ],
)
def test_invalid_tools_are_refused(fields, param):
    assert refusal("qwen25", **fields).param == param


def test_tool_whose_arguments_are_no_object_is_left_loose_and_named(constraints, vocab):
    for kind in ("string", ["string", "null"]):
        odd = replace(WEATHER, parameters={"type": kind})
        request = request_of(tools=(odd,), tool_choice=choose("required"))
        assert unenforced_fields(request) == ["tools[0].parameters#/type"]
        call = '<tool_call>\n{"name": "get_weather", "arguments": {"a": 1}}\n</tool_call>'
        constraint = load_format("qwen25", vocab).process(request).constraint
        assert matcher_after(constraints, vocab, constraint, call)


@pytest.mark.parametrize("constraint", [None, JsonSchema({"type": "boolean"})])
@pytest.mark.parametrize("mode", ["auto", "required", "named"])
def test_tool_beyond_the_grammar_is_left_loose_and_named(constraints, vocab, mode, constraint):
    request = request_of(tools=(WEATHER, ODD), tool_choice=choose(mode), constraint=constraint)
    chat = load_format("qwen25", vocab).process(request)
    loose = ["tools[1].parameters#/properties/a/uniqueItems"]
    assert unenforced_fields(request) == ([] if mode == "named" else loose)
    call = '<tool_call>\n{"name": "%s", "arguments": {"a": [1, 1], "city": 2}}\n</tool_call>'
    for name, is_allowed in (("odd", mode != "named"), ("get_weather", False)):
        assert bool(matcher_after(constraints, vocab, chat.constraint, call % name)) is is_allowed


def test_strict_tool_beyond_the_grammar_is_refused_where_its_call_may_be_needed():
    strict = replace(ODD, strict=True)
    for fields in (
        {"tool_choice": ToolChoice(mode="required")},
        {"tool_choice": ToolChoice(mode="named", name="odd")},
        {"constraint": JsonSchema({"type": "boolean"})},
    ):
        error = refusal("qwen25", tools=(WEATHER, strict), **fields)
        assert isinstance(error, UnsupportedConstraintError)
        assert error.param == "tools[1].parameters#/properties/a/uniqueItems"
    process("qwen25", tools=(WEATHER, strict), tool_choice=choose("named"))
    process("qwen25", tools=(WEATHER, strict))


def test_broken_arguments_of_earlier_calls_are_named():
    texts = ('{"city": "Par', "", "[]", '{"city": "Rome"}', "\ud800")
    calls = tuple(ToolCall(id=str(i), name="f", arguments=text) for i, text in enumerate(texts))
    messages = (*USER, Message(role="assistant", tool_calls=calls))
    named = [f"messages[1].tool_calls[{i}].arguments" for i in (0, 4)]
    assert unenforced_fields(request_of(messages=messages)) == named


#: Arguments as a client sends back what a cut answer or another server left.
BROKEN = ('{"path": "data.txt", "content": "cut', "null", "[]", '"x"', "", "{'a': 1}", "\x00", "{}}")


TOOL_RESULT = Message(role="tool", content="thirty degrees", tool_call_id="call_1")


@pytest.mark.parametrize("name", FAMILY_TEMPLATES)
@pytest.mark.parametrize("arguments", BROKEN)
def test_conversation_with_broken_arguments_renders(name, arguments):
    call = ToolCall(id="call_1", name="get_weather", arguments=arguments)
    messages = (*USER, Message(role="assistant", tool_calls=(call,)), TOOL_RESULT, *USER)
    text = load_format(name).render(request_of(messages=messages, tools=(WEATHER,)))
    assert "thirty degrees" in text


def test_template_that_takes_text_shows_broken_arguments():
    broken = Message(role="assistant", tool_calls=(ToolCall(id="1", name="f", arguments=BROKEN[0]),))
    request = request_of(messages=(*USER, broken))
    assert BROKEN[0] in load_format("qwen3").render(request)
    assert "<function=f>\n</function>" in load_format("qwen_xml").render(request)


_ROME = ToolCall(id="call_1", name="get_weather", arguments='{"city": "Rome"}')
CALL = Message(role="assistant", tool_calls=(_ROME,))
ANSWER = Message(role="assistant", content="Aye.")
#: Conversations as clients send them after an interruption, or with a greeting of their own.
UNUSUAL = {
    "user after a result": (*USER, CALL, TOOL_RESULT, *USER),
    "user between call and result": (*USER, CALL, *USER, TOOL_RESULT),
    "system between call and result": (*USER, CALL, SYSTEM, TOOL_RESULT),
    "greeting first": (ANSWER, *USER),
    "system and greeting first": (SYSTEM, ANSWER, *USER),
    "two users after a result": (*USER, CALL, TOOL_RESULT, *USER, *USER),
    "an answer twice": (*USER, ANSWER, ANSWER, *USER),
    "calls first": (CALL, TOOL_RESULT, *USER),
    "calls twice": (*USER, CALL, TOOL_RESULT, CALL, TOOL_RESULT, *USER),
    "result of nothing": (*USER, TOOL_RESULT, *USER),
    "ends with the assistant": (*USER, ANSWER),
}


@pytest.mark.parametrize("name", FAMILY_TEMPLATES)
@pytest.mark.parametrize("messages", UNUSUAL.values(), ids=UNUSUAL.keys())
def test_unusual_order_of_roles_renders(name, messages):
    text = load_format(name).render(request_of(messages=messages))
    assert text.count(USER[0].content) >= messages.count(USER[0])


@pytest.mark.parametrize("mode", ["required", "named"])
def test_required_call_overrides_a_constraint_of_the_answer(mode):
    fields = {"tools": (WEATHER,), "tool_choice": choose(mode)}
    with_format = process("qwen25", constraint=JsonSchema({"type": "object"}), **fields)
    assert with_format.constraint == process("qwen25", **fields).constraint


def test_tool_choice_none_shows_and_parses_no_tools():
    chat = process("qwen25", tools=(WEATHER,), tool_choice=ToolChoice(mode="none"))
    assert "get_weather" not in chat.prompt
    assert chat.constraint is None
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
    assert parse(chat.parser, call) == [TextDelta(call)]


def test_template_without_tools_gets_a_description():
    chat_format = load_format("gemma3", architecture="gemma3")
    prompt = chat_format.render(request_of(tools=(WEATHER,)))
    assert '"maxLength":8' in prompt
    assert '{"name": "get_weather", "parameters": {"city": "<city>"}}' in prompt
    prompt = chat_format.render(request_of(messages=(*USER, CALL, TOOL_RESULT), tools=(WEATHER,)))
    assert '{"name": "get_weather", "parameters": {"city": "Rome"}}' in prompt
    assert "<tool_response>\nthirty degrees\n</tool_response>" in prompt
    prompt = chat_format.render(request_of(messages=(SYSTEM, *USER), tools=(WEATHER,)))
    assert "Be brief.\n\nYou can call" in prompt


@pytest.mark.parametrize(
    ("name", "special"),
    [
        *((name, True) for name in ("mistral_list", "mistral_args", "phi4mini", "llama31")),
        *((name, False) for name in ("qwen25", "gemma3")),
    ],
)
def test_parser_asks_for_control_tokens_if_they_mark_calls(name, special):
    assert process(name, tools=(WEATHER,)).parser.special_tokens is special


def test_grammar_names_control_token_markers_by_number():
    chat = process("mistral_args", tools=(WEATHER,), tool_choice=choose("required"))
    assert isinstance(chat.constraint, Lark)
    assert "<[10]>" in chat.constraint.source
    assert "<[11]>" in chat.constraint.source


def test_constraint_waits_for_reasoning_of_the_template():
    plain = JsonSchema({"type": "boolean"})
    assert process("qwen25", constraint=plain).constraint is plain
    off = {"enable_thinking": False}
    assert process("qwen3", constraint=plain, template_options=off).constraint is plain
    assert isinstance(process("qwen3", constraint=plain).constraint, Lark)


def test_reasoning_opened_by_the_prompt_is_parsed():
    chat = process("deepseek_r1")
    assert chat.prompt.endswith("<think>\n")
    assert parse(chat.parser, "hm</think>\n\nYes") == [ReasoningDelta("hm"), TextDelta("Yes")]


TEMPLATES = "qwen25 llama31 mistral_list mistral_args gemma3 phi4mini hermes3 smollm2 smollm3".split()


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("mode", ["required", "named"])
def test_required_call_grammar_draws_only_calls(constraints, vocab, name, mode):
    off = {"enable_thinking": False}
    request = request_of(tools=(WEATHER, PING), tool_choice=choose(mode), template_options=off)
    for seed in range(8):
        chat = load_format(name, vocab).process(request)
        text = draw_text(constraints, vocab, chat.constraint, seed)
        events = parse(chat.parser, text)
        calls = [event for event in events if isinstance(event, ToolCallDelta) and event.name]
        assert all(isinstance(event, ToolCallDelta) for event in events), text
        assert 1 <= len(calls) <= 8
        assert len(calls) == 1 or mode == "required"
        names = {"get_weather"} if mode == "named" else {"get_weather", "ping"}
        assert {call.name for call in calls} <= names


@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3"])
def test_required_calls_wait_for_reasoning(constraints, vocab, name):
    chat = process(name, vocab, tools=(WEATHER,), tool_choice=choose("required"))
    thought = "Let me think.\n</think>\n\n" if name == "deepseek_r1" else "<think>\nhm\n</think>\n\n"
    matcher = matcher_after(constraints, vocab, chat.constraint, thought)
    assert matcher
    forced = b"".join(map(vocab.piece, matcher.forced_tokens())).decode()
    assert forced.startswith("<")
    assert "call" in forced


MIXED = Tool(
    name="mixed",
    parameters={
        "type": "object",
        "$defs": {"point": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
        "properties": {
            "text": {"type": "string"},
            "unit": {"enum": ["C", "F"]},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "at": {"$ref": "#/$defs/point"},
            "on": {"type": "boolean"},
        },
        "required": ["text", "unit"],
    },
)


#: MIXED without texts, which a walk at random never ends.
_TYPED = {name: MIXED.parameters["properties"][name] for name in ("unit", "at", "on")}
TYPED = Tool(name="typed", parameters={**MIXED.parameters, "properties": _TYPED, "required": ["unit"]})


def test_xml_call_grammar_draws_typed_calls_that_parse(constraints, vocab):
    request = request_of(tools=(TYPED, PING), tool_choice=choose("required"))
    check = jsonschema.Draft202012Validator(TYPED.parameters)
    names = set()
    for seed in range(12):
        chat = load_format("qwen_xml", vocab).process(request)
        calls: list[list[str]] = []
        for event in parse(chat.parser, draw_text(constraints, vocab, chat.constraint, seed)):
            assert isinstance(event, ToolCallDelta)
            calls += [[event.name, ""]] if event.name else []
            calls[-1][1] += event.arguments
        for name, arguments in calls:
            names.add(name)
            if name == "typed":
                check.validate(json.loads(arguments))
    assert names == {"typed", "ping"}


def test_xml_call_may_show_a_call(constraints, vocab):
    chat = process("qwen_xml", vocab, tools=(MIXED,))
    shown = "see:\n<tool_call>\n<function=mixed>\n<parameter=text>\nx\n</parameter>\n</function>\n</tool_call>\n."
    call = write_call(FAMILIES["qwen-xml"], "mixed", json.dumps({"text": shown, "unit": "C"}))
    matcher = matcher_after(constraints, vocab, chat.constraint, "I will.\n" + call)
    assert matcher
    assert matcher.accept(vocab.eos_tokens[0])


@pytest.mark.parametrize("name", ["qwen25", "mistral_list"])
def test_begun_free_call_must_be_well_formed(constraints, vocab, name):
    chat = process(name, vocab, tools=(WEATHER,))
    marker = "<tool_call>" if name == "qwen25" else "[TOOL_CALLS]"
    matcher = matcher_after(constraints, vocab, chat.constraint, "Let me see. " + marker)
    assert matcher
    assert b"name" in b"".join(map(vocab.piece, matcher.forced_tokens()))
    assert not any(matcher.accept(token) for token in vocab.eos_tokens)


def test_free_calls_allow_plain_text(constraints, vocab):
    chat = process("qwen25", vocab, tools=(WEATHER,))
    text = 'Just words, a < b, {"json": 1} and <tool.'
    matcher = matcher_after(constraints, vocab, chat.constraint, text)
    assert matcher
    assert matcher.accept(vocab.eos_tokens[0])


@pytest.mark.parametrize(
    "constraint", [JsonSchema({"type": "boolean"}), Choice(("yes", "no")), Regex("[ab]c")]
)
def test_constraints_allow_reasoning_before_them(constraints, vocab, constraint):
    chat = process("qwen3", vocab, constraint=constraint)
    for thought in ("", "<think>\nhm\n</think>\n\n"):
        assert matcher_after(constraints, vocab, chat.constraint, thought)


@pytest.mark.parametrize("name", TEMPLATES)
def test_answer_with_tools_and_constraint_is_a_call_or_follows_it(constraints, vocab, name):
    off = {"enable_thinking": False}
    request = request_of(tools=(WEATHER,), constraint=Choice(("yes", "no")), template_options=off)
    seen = set()
    for seed in range(12):
        chat = load_format(name, vocab).process(request)
        text = draw_text(constraints, vocab, chat.constraint, seed)
        events = parse(chat.parser, text)
        if isinstance(events[0], TextDelta):
            assert text in ("yes", "no")
        else:
            assert all(isinstance(event, ToolCallDelta) for event in events)
        seen.add(type(events[0]))
    assert TextDelta in seen


def test_answer_of_a_constraint_that_looks_like_a_call_is_no_certain_call():
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "a\nb"}}</tool_call>'
    chat = process("hermes3", tools=(WEATHER,), constraint=Choice((text,)))
    assert parse(chat.parser, text) == [TextDelta(text)]


def run(engine: Any, **fields: Any) -> tuple[list[Any], Finished]:
    events = list(engine.submit(request_of(sampling=Sampling(temperature=1.0, seed=3), **fields)))
    return events[:-1], events[-1]


@pytest.mark.model
def test_model_calls_the_required_tool(smol):
    for mode, name in (("required", ""), ("named", "get_weather")):
        choice = ToolChoice(mode=mode, name=name)
        events, finished = run(smol, tools=(WEATHER, PING), tool_choice=choice, max_tokens=400)
        calls = [event for event in events if isinstance(event, ToolCallDelta) and event.name]
        assert finished.reason == "tool_calls"
        assert calls
        assert not any(isinstance(event, TextDelta) for event in events)
        assert name in ("", calls[0].name)


def test_call_grammar_is_shared_under_one_salt_only():
    chat_format = load_format("qwen25")

    def constraint_for(salt: str) -> Any:
        return chat_format.process(request_of(tools=(WEATHER,), cache_salt=salt)).constraint

    first = constraint_for("a")
    assert first is not None
    assert constraint_for("a") is first
    assert constraint_for("b") is not first
