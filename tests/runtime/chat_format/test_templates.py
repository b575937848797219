"""The main families' templates take our messages and tools, whatever each of them knows and
insists on.
"""

import functools
import re
from datetime import datetime

import pytest
from made_formats import FAMILY_TEMPLATES, template_text

from edgeinfer.errors import InvalidRequestError
from edgeinfer.runtime.chat_format.templates import CHATML, TRANSCRIPT, ChatTemplate, choose
from edgeinfer.runtime.requests import Message, Tool, ToolCall

TOOL = Tool(
    name="get_weather",
    description="Weather <now> & then",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string", "description": "größte"}},
        "required": ["city"],
    },
)
USER = Message(role="user", content='Is it <hot> & "dry"?')
SYSTEM = Message(role="system", content="Answer as a pirate.")
_KOELN = ToolCall(id="call_12345678", name="get_weather", arguments='{"city": "Köln"}')
CALL = Message(role="assistant", tool_calls=(_KOELN,))
RESULT = Message(role="tool", content="31", tool_call_id="call_12345678", name="get_weather")


@functools.cache
def load(name: str) -> ChatTemplate:
    return ChatTemplate.load(template_text(name), "<s>", "</s>")


@pytest.mark.parametrize("name", FAMILY_TEMPLATES)
def test_conversation_with_a_system_prompt_renders(name):
    text = load(name).render(
        (SYSTEM, USER, Message(role="assistant", content="Aye."), Message(role="user", content="Sure?"))
    )
    for text_part in (SYSTEM.content, USER.content, "Aye.", "Sure?"):
        assert text_part in text
    assert text.index("Aye.") < text.index("Sure?")
    assert "None" not in text


@pytest.mark.parametrize("name", FAMILY_TEMPLATES)
@pytest.mark.parametrize("first", [(), (SYSTEM,)])
def test_late_system_turn_keeps_its_place(name, first):
    """Written as one where the template can, else with the user's words next to it: never left out."""
    turns = (
        *first,
        Message(role="user", content="alpha"),
        Message(role="assistant", content="beta"),
        Message(role="system", content="gamma"),
        Message(role="user", content="delta"),
        Message(role="system", content="epsilon"),
    )
    prompt = load(name).render(turns)
    places = [prompt.find(word) for word in ("alpha", "beta", "gamma", "delta", "epsilon")]
    assert places[0] > -1
    assert places == sorted(places)


@pytest.mark.parametrize("name", FAMILY_TEMPLATES)
def test_developer_turn_falls_back_to_system(name):
    developer = Message(role="developer", content=SYSTEM.content)
    assert load(name).render((developer, USER)) == load(name).render((SYSTEM, USER))


@pytest.mark.parametrize(
    "name", "qwen25 qwen3 llama31 mistral_list mistral_args hermes3 phi4mini smollm3".split()
)
def test_tools_are_shown_as_plain_json(name):
    template = load(name)
    assert template.traits.tools or name == "phi4mini"  # which shows them in a system prompt only
    text = template.render((SYSTEM, USER), (TOOL,))
    assert '"get_weather"' in text
    assert "größte" in text
    assert "\\u00" not in text.replace("\\u003c", "")


@pytest.mark.parametrize(
    "name", "qwen25 qwen3 llama31 mistral_list mistral_args hermes3 phi4mini deepseek_r1".split()
)
def test_earlier_calls_and_results_render(name):
    template = load(name)
    assert template.traits.tool_calls
    assert template.traits.tool_role
    text = template.render((USER, CALL, RESULT), (TOOL,))
    assert '{"city": "Köln"}' in text
    assert "31" in text
    assert "None" not in text
    assert text.index("get_weather") < text.rindex("31")


def test_traits_are_probed_by_rendering():
    assert not load("gemma3").traits.system
    assert not load("gemma3").traits.tools
    assert load("deepseek_r1").traits.string_arguments
    assert not load("qwen25").traits.string_arguments
    assert load("mistral_list").traits.short_ids
    assert load("qwen3").traits.reasoning_key == "reasoning_content"
    assert not load("smollm2").traits.tools


def test_foreign_call_ids_are_mapped_for_mistral():
    text = load("mistral_list").render((USER, CALL, RESULT), (TOOL,))
    (call_id,) = set(re.findall(r'"(?:call_)?id": "([^"]*)"', text))
    assert re.fullmatch(r"[a-z0-9]{9}", call_id)
    call = ToolCall(id="abcdeFGH1", name="get_weather", arguments="{}")
    assert '"id": "abcdeFGH1"' in load("mistral_list").render(
        (USER, Message(role="assistant", tool_calls=(call,))), (TOOL,)
    )


def test_gemma_gets_the_system_prompt_in_the_first_turn():
    turn = f"<start_of_turn>user\n{SYSTEM.content}\n\n{USER.content}<end_of_turn>\n"
    assert load("gemma3").render((SYSTEM, USER)) == f"<s>{turn}<start_of_turn>model\n"


def test_turns_of_one_role_are_joined_if_the_template_insists():
    text = load("gemma3").render((USER, Message(role="user", content="And cold?")))
    assert f"{USER.content}\n\nAnd cold?" in text


def test_template_error_reaches_the_client():
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate.load(
            "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}"
        ).render((USER, Message(role="assistant", content="a")))
    assert caught.value.param == "messages"
    assert "one turn only" in caught.value.message


@pytest.mark.parametrize("name", FAMILY_TEMPLATES)
def test_continued_answer_stays_open(name):
    answer = Message(role="assistant", content="It is very ")
    text = load(name).render((USER, answer), continue_final=True)
    assert text.endswith("It is very ")
    assert text.count("It is very") == 1


@pytest.mark.parametrize("name", FAMILY_TEMPLATES)
def test_unfinished_question_is_a_prefix_of_the_whole_one(name):
    turns = (SYSTEM, USER, Message(role="assistant", content="Aye."))
    text_part = Message(role="user", content="Why is")
    whole = Message(role="user", content="Why is the sea salt?")
    prompt = load(name).render((*turns, text_part), continue_final=True)
    assert prompt.endswith("Why is")
    assert load(name).render((*turns, whole)).startswith(prompt)


def test_several_calls_are_split_for_templates_of_one_call():
    calls = tuple(ToolCall(id=f"call_{i}", name=f"f{i}", arguments="{}") for i in range(2))
    results = tuple(
        Message(role="tool", content=f"result {i}", tool_call_id=f"call_{i}") for i in range(2)
    )
    turns = (USER, Message(role="assistant", tool_calls=calls), *results)
    text = load("llama31").render(turns, (TOOL,))
    assert text.index('"f0"') < text.index("result 0") < text.index('"f1"') < text.index("result 1")


def test_calls_and_their_results_cannot_be_continued():
    for messages in ((USER, CALL, RESULT), (USER, CALL), ()):
        with pytest.raises(InvalidRequestError):
            load("qwen25").render(messages, continue_final=bool(messages))


def test_options_reach_the_template():
    assert load("qwen3").render((USER,)).endswith("<|im_start|>assistant\n")
    without_thinking = load("qwen3").render((USER,), options={"enable_thinking": False})
    assert without_thinking.endswith("<think>\n\n</think>\n\n")
    assert "Today Date: then" in load("llama31").render((USER,), options={"date_string": "then"})
    assert datetime.now().astimezone().strftime("%Y") in load("llama31").render((USER,))


def test_reasoning_renders_under_the_templates_key():
    thought = Message(role="assistant", reasoning="hm", tool_calls=CALL.tool_calls)
    assert "<think>\nhm\n</think>" in load("qwen3").render((USER, thought, RESULT), (TOOL,))
    thought = Message(role="assistant", content="a", reasoning="hm")
    assert "hm" not in load("qwen25").render((USER, thought, USER))


def test_model_without_a_template_gets_chatml_or_a_transcript():
    template, reason = choose("", "<s>", "</s>", has_chatml=True)
    assert template.source == CHATML
    assert "ChatML" in reason
    assert template.render((SYSTEM, USER)).endswith("<|im_start|>assistant\n")
    plain, reason = choose("  ", "<s>", "</s>", has_chatml=False)
    assert plain.source == TRANSCRIPT
    assert "base model" in reason
    assert plain.render((SYSTEM, USER)) == f"<s>{SYSTEM.content}\n\nUser: {USER.content}\nAssistant:"
    for said in (" Yes.", "Yes."):  # what the model said comes back as it said it, so the cache has it
        answered = plain.render((USER, Message(role="assistant", content=said), USER))
        assert answered == f"<s>User: {USER.content}\nAssistant: Yes.\nUser: {USER.content}\nAssistant:"


def test_hugging_face_extensions_render():
    source = (
        "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}{%- if loop.first -%}{%- continue "
        "-%}{%- endif -%}"
        "{%- set ns.n = ns.n + 1 -%}{%- endfor -%}{{ ns.n }}{{ {'a': '<é>'} | tojson }}{{ [1] | "
        "tojson(indent=2) }}\n"
        "    {% if true %}\nx\n    {% endif %}\n"
    )
    assert ChatTemplate.load(source).render((USER, USER)) == '1{"a": "<é>"}[\n  1\n]\nx\n'


def test_template_that_reads_parts_gets_parts():
    """A template that walks over a content's parts would leave out the words of a plain text."""
    template = ChatTemplate.load(
        "{% for m in messages %}{{ m['role'] }}: {% for part in m['content'] %}"
        "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %};{% endfor %}"
    )
    assert template.traits.typed_content
    assert template.traits.system
    assert template.render((SYSTEM, USER)) == f"system: {SYSTEM.content};user: {USER.content};"
    assert not template.traits.tight_pictures
    assert not any(load(name).traits.typed_content for name in FAMILY_TEMPLATES)


def test_template_that_writes_no_space_before_a_picture_is_known():
    """As SmolVLM's: `User:` before a picture, `User: ` before words."""
    template = ChatTemplate.load(
        "{% for m in messages %}{{ m['role'] | capitalize }}"
        "{% if m['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}{% for part in m['content'] %}"
        "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<image>{% endif %}{% endfor %};"
        "{% endfor %}"
    )
    assert template.traits.tight_pictures
