"""A reasoning span ends when its budget is spent, and the answer behind it is the model's own."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from fake_engine import FakeEngine

from edgeinfer.errors import InvalidRequestError
from edgeinfer.runtime.chat_format.answer_parser import AnswerParser
from edgeinfer.runtime.chat_format.detokenizer import Detokenizer, ReasoningBudget
from edgeinfer.runtime.chat_format.reasoning import THINK
from edgeinfer.runtime.chat_format.tool_call_formats import FAMILIES
from edgeinfer.runtime.engine import LlamaEngine, load_engine
from edgeinfer.runtime.events import ReasoningDelta, TextDelta
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.runtime.requests import GenerateRequest, JsonSchema, Message

from ..conftest import answer, ask, collect

OPENS_A_SPAN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}{# </think> #}"
)
QUESTION = (Message(role="user", content="Why is the sky blue?"),)


def think(**fields: object) -> GenerateRequest:
    return ask(**{"prompt": None, "messages": QUESTION, "max_tokens": 24, **fields})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[LlamaEngine]:
    """SmolLM2, made to reason: its template opens a span."""
    files = ModelFiles(name="thinker", paths=(str(smollm2),), chat_template=OPENS_A_SPAN)
    with closing(load_engine(files, LoadOptions(n_ctx=1024, n_parallel=2, kv_type="q8_0"))) as opened:
        yield opened


@pytest.mark.parametrize("speculative", ["off", "ngram"])
def test_the_answer_is_what_the_model_says_behind_the_closed_span(
    engine: LlamaEngine, speculative: str
) -> None:
    request = think(reasoning_budget=6, speculative=speculative, logprobs=0)
    events = list(engine.submit(request))
    reply = collect(events)
    said = [event for event in events if isinstance(event, ReasoningDelta | TextDelta)]
    tokens = [entry.chosen.token_id for event in said for entry in event.logprobs]
    prompt = engine.tokenize_chat(think())
    close = engine.tokenize("</think>", parse_special=True)
    usage = reply.finish.usage
    assert usage.completion_tokens == 24 == len(tokens) + len(close)
    assert 0 < usage.reasoning_tokens <= 6
    asked = {"max_tokens": len(tokens) - 6, "logprobs": 0, "speculative": "off"}
    behind = ask((*prompt, *tokens[:6], *close), **asked)
    expected = answer(engine, behind)
    assert tokens[6:] == [entry.chosen.token_id for entry in expected.logprobs]
    assert "think>" not in reply.reasoning != ""
    assert reply.text == expected.text.lstrip("\n")


def test_without_a_budget_this_model_reasons_to_the_end(engine: LlamaEngine) -> None:
    reply = answer(engine, think())
    assert (reply.text, bool(reply.reasoning)) == ("", True)


def test_no_budget_at_all_closes_the_span_in_the_prompt(engine: LlamaEngine) -> None:
    reply = answer(engine, think(reasoning_budget=0))
    assert (reply.reasoning, bool(reply.text)) == ("", True)
    assert reply.finish.usage.completion_tokens == 24
    assert reply.finish.usage.prompt_tokens == len(engine.tokenize_chat(think(reasoning_budget=0)))


def test_a_constraint_holds_behind_the_closed_span(engine: LlamaEngine) -> None:
    schema = {"type": "object", "properties": {"blue": {"type": "boolean"}}}
    schema |= {"required": ["blue"], "additionalProperties": False}
    request = think(reasoning_budget=5, constraint=JsonSchema(schema), ignore_eos=False, max_tokens=60)
    reply = answer(engine, request)
    assert reply.reasoning != ""
    assert isinstance(msgspec.json.decode(reply.text)["blue"], bool)


def budget_states(engine: LlamaEngine, n_tokens: int, said: str, *, opened: bool = False) -> list[bool]:
    """Tell after each token of `said` if the budget is spent."""
    vocab = engine._loaded.vocab
    parser = AnswerParser(FAMILIES["hermes"], {}, span=THINK, opened=opened)
    detokenizer = Detokenizer(vocab, (), parser)
    budget = ReasoningBudget(n_tokens, (), opened=opened)
    is_spent = []
    for token in vocab.tokenize(said):
        detokenizer.feed(token)
        is_spent.append(budget.is_spent(detokenizer))
    return is_spent


def test_a_span_that_the_model_opens_is_counted_from_its_marker_on(engine: LlamaEngine) -> None:
    n_marker = len(engine.tokenize("<think>"))
    is_spent = budget_states(engine, 2, "<think>one two three")
    assert is_spent.index(True) == n_marker - 1 + 2
    assert budget_states(engine, 0, "<think>one").index(True) == n_marker - 1
    assert not any(budget_states(engine, 0, "An answer without a span"))


def test_a_span_is_not_closed_within_a_character_or_a_marker(engine: LlamaEngine) -> None:
    n_bytes = len(engine.tokenize("\U0001f999"))
    assert n_bytes > 2
    is_spent = budget_states(engine, 1, "\U0001f999", opened=True)
    assert is_spent == [False] * (n_bytes - 1) + [True]
    assert not any(budget_states(engine, 1, "</think>", opened=True))


@pytest.mark.parametrize("fields", [{"reasoning_budget": -1}, {"messages": (), "prompt": "a"}])
def test_invalid_reasoning_budget_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        FakeEngine().submit(think(**{"reasoning_budget": 1, **fields}))
    assert caught.value.param == "reasoning_budget"
