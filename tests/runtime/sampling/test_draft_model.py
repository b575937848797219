"""A draft model: the same texts with it as without, and drafts only where they pay."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from edgeinfer.errors import EngineError, ModelLoadError, OutOfMemoryError
from edgeinfer.runtime.engine import LlamaEngine, load_engine
from edgeinfer.runtime.event_stream import EventStream
from edgeinfer.runtime.events import Event, TextDelta
from edgeinfer.runtime.kv_cache import CachedSequence
from edgeinfer.runtime.memory_plan import DRAFT_BATCH
from edgeinfer.runtime.options import Chosen, LoadOptions, ModelFiles
from edgeinfer.runtime.requests import GenerateRequest, JsonSchema, Sampling
from edgeinfer.runtime.sampling import draft_model
from edgeinfer.runtime.sampling.speculative import DraftBudget

from ...conftest import ROOT
from ..conftest import answer, answers, ask

SCHEMA = JsonSchema(
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 20}, "years": {"type": "integer"}},
            "required": ["name", "years"],
        },
        "minItems": 2,
        "maxItems": 2,
    }
)
STORY = "Once upon a time there was a fisherman who"


def load(path: Path, draft: Path, *, draft_option: str = "small", **options: object) -> LlamaEngine:
    files = ModelFiles(name="m", paths=(str(path),), draft="small", draft_paths=(str(draft),))
    load_options = {"n_ctx": 1024, "n_parallel": 4, "draft": draft_option, **options}
    return load_engine(files, LoadOptions(**load_options))  # type: ignore[arg-type]


def pin_costs(engine: LlamaEngine, row_s: Callable[[int], float], draft_s: float) -> None:
    """Have the engine draft as if steps of so many rows, and draft tokens, took these times."""
    costs = engine._core.executor.step_costs
    costs.measure(row_s)
    for n in range(2, 9):
        costs.record(n, n, row_s(n))
    costs.record = lambda *args: None  # type: ignore[method-assign]
    engine._draft.cost = engine._draft.least_cost = draft_s / row_s(1)
    engine._draft.record_cost = lambda cost: None  # type: ignore[method-assign]


@contextmanager
def drafting(path: Path, draft: Path, **options: object) -> Iterator[LlamaEngine]:
    """An engine that drafts as if a draft token cost a twentieth of a step."""
    with closing(load(path, draft, **options)) as opened:  # type: ignore[arg-type]
        pin_costs(opened, lambda rows: 0.060 + 0.002 * rows, 0.003)
        yield opened


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[LlamaEngine]:
    """SmolLM2 that drafts for itself."""
    with drafting(smollm2, smollm2) as opened:
        yield opened


def draft_tokens(engine: LlamaEngine, request: GenerateRequest) -> tuple[int, int]:
    """Compare the text with that without drafts; the draft tokens and those accepted."""
    expected = answer(engine, replace(request, speculative="off"))
    reply = answer(engine, request)
    assert reply.text == expected.text
    assert reply.finish.reason == expected.finish.reason
    assert expected.finish.timings.draft_tokens == 0
    return reply.finish.timings.draft_tokens, reply.finish.timings.draft_accepted_tokens


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0),
        Sampling(temperature=0.9, seed=3),
        Sampling(temperature=0.7, seed=4, top_k=30, repeat_penalty=1.2, repeat_last_n=64),
    ],
)
def test_text_is_the_same_and_the_model_agrees_with_itself(
    engine: LlamaEngine, sampling: Sampling
) -> None:
    drafted, accepted = draft_tokens(engine, ask(STORY, sampling=sampling, max_tokens=60))
    assert drafted > 20
    assert accepted > 0.8 * drafted


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0),
        Sampling(temperature=0.8, seed=5),
        Sampling(temperature=0.8, seed=5, repeat_penalty=1.3, repeat_last_n=64),
    ],
)
def test_text_under_a_schema_is_the_same(
    engine: LlamaEngine, sampling: Sampling, logprobs: int | None
) -> None:
    for max_tokens in (7, 23, 120):
        limits = {"max_tokens": max_tokens, "logprobs": logprobs, "ignore_eos": False}
        asked = ask("Two people as JSON: ", constraint=SCHEMA, sampling=sampling, **limits)
        drafted, accepted = draft_tokens(engine, asked)
    assert accepted > 0.6 * drafted > 0


def test_tokens_that_a_schema_forces_are_drafted_without_the_draft_model(engine: LlamaEngine) -> None:
    """And the drafts go on after them, so that most steps verify several values."""
    names = ("name of the person", "colour of the person's house", "reasons for the colour")
    parts = {name: {"enum": ["yes, of course", "no, never", "it depends"]} for name in names}
    schema = JsonSchema({"type": "object", "properties": parts, "required": [*parts]})
    asked = ask("As JSON: ", constraint=schema, max_tokens=100, ignore_eos=False, cache_prompt=False)
    answer(engine, asked)  # acceptance is learned
    n_computed, counters = count_computed(engine), engine._core.counters
    n_before = counters.steps_total
    expected = answer(engine, replace(asked, speculative="off"))
    n_sampled, n_tokens = counters.steps_total - n_before, expected.finish.usage.completion_tokens
    drafted, _ = draft_tokens(engine, asked)
    assert n_sampled < 0.5 * n_tokens
    assert 0 < len(n_computed) < 0.6 * n_tokens
    assert drafted > 0.5 * n_tokens


@pytest.mark.needs("time")
@pytest.mark.parametrize("logprobs", [None, 0])
def test_forced_text_longer_than_a_batch_of_the_draft_model_ends_the_draft(
    engine: LlamaEngine, logprobs: int | None
) -> None:
    schema = JsonSchema({"const": " ".join(map(str, range(3 * DRAFT_BATCH)))})
    limits = {"max_tokens": 2 * DRAFT_BATCH, "logprobs": logprobs, "ignore_eos": False}
    for n_missing in range(DRAFT_BATCH - 3, DRAFT_BATCH + 3):
        asked = ask(STORY + " and" * n_missing, constraint=schema, cache_prompt=False, **limits)
        draft_tokens(engine, replace(asked, max_tokens=12))
    draft_tokens(engine, asked)


def test_text_that_ends_at_a_stop_string_is_the_same(engine: LlamaEngine) -> None:
    whole = answer(engine, ask(STORY, max_tokens=60, speculative="off")).text
    for start in (20, 50, 90):
        request = ask(STORY, max_tokens=60, stop=(whole[start : start + 4],))
        draft_tokens(engine, request)


def test_several_streams_draft_and_say_the_same(engine: LlamaEngine) -> None:
    prompts = [f"{STORY} lived in {city}. He" for city in ("Lisbon", "Oslo", "Kyoto", "Lima")]
    sampling = Sampling(temperature=0.8, seed=1)
    requests = [ask(prompt, max_tokens=50, sampling=sampling) for prompt in prompts]
    expected = answers(engine, [replace(r, speculative="off") for r in requests])
    replies = answers(engine, requests)
    assert [reply.text for reply in replies] == [reply.text for reply in expected]
    assert sum(reply.finish.timings.draft_accepted_tokens for reply in replies) > 20


def count_computed(engine: LlamaEngine) -> list[int]:
    """Return a list that gets the number of tokens of each step of the draft model."""
    model, n_computed = engine._draft, []
    compute = model.compute

    def count(cached_seq: CachedSequence, tokens: list[int], budget: DraftBudget) -> bool:
        n_computed.append(len(tokens))
        return compute(cached_seq, tokens, budget)

    model.compute = count  # type: ignore[method-assign,assignment]
    return n_computed


def test_next_turn_goes_on_with_the_text_that_the_draft_model_has(engine: LlamaEngine) -> None:
    n_computed = count_computed(engine)
    prompt = (ROOT / "edgeinfer/data/perplexity.txt").read_text()[:400]
    said = answer(engine, ask(prompt, max_tokens=40)).text
    assert max(n_computed) > 40
    n_computed.clear()
    draft_tokens(engine, ask(f"{prompt}{said} Then he said", max_tokens=40))
    assert 0 < max(n_computed) < 20


def test_long_text_is_caught_up_with_in_pieces(engine: LlamaEngine) -> None:
    n_computed = count_computed(engine)
    prompt = (ROOT / "edgeinfer/data/perplexity.txt").read_text()[2000:4000]
    draft_tokens(engine, ask(prompt, max_tokens=60))
    assert n_computed.count(DRAFT_BATCH) > 1


@pytest.mark.needs("time")
def test_shifted_context_says_the_same(smollm2: Path) -> None:
    with drafting(smollm2, smollm2, n_ctx=256, n_parallel=1) as opened:
        request = ask(STORY, max_tokens=400, overflow="shift", cache_prompt=False)
        drafted, _ = draft_tokens(opened, request)
        assert drafted > 0


def test_cancelled_request_leaves_the_draft_model_free(engine: LlamaEngine) -> None:
    for _ in range(3):
        stream = engine.submit(ask(STORY, max_tokens=900, conversation="c"))
        n_texts = 0
        for event in stream:
            n_texts += isinstance(event, TextDelta)
            if n_texts == 12:
                stream.cancel()
    assert not any(c.in_use for c in engine._draft.kv.cached_sequences)
    drafted, _ = draft_tokens(engine, ask(STORY, max_tokens=30))
    assert drafted > 0


def test_private_request_leaves_nothing(smollm2: Path) -> None:
    with drafting(smollm2, smollm2) as opened:
        request = ask(STORY, max_tokens=30, cache_prompt=False)
        assert answer(opened, request).finish.timings.draft_tokens > 0
        assert opened._draft.kv.cached_sequences == []
        opened.park()
        assert opened._draft.kv.used_cells == 0


@pytest.mark.needs("time")
def test_evicted_texts_are_computed_again(smollm2: Path) -> None:
    """A cache that holds one of the texts."""
    with drafting(smollm2, smollm2, n_ctx=256, n_parallel=1) as opened:
        for _ in range(2):
            for animal in ("cat", "dog", "owl"):
                drafted, _ = draft_tokens(opened, ask(f"The {animal} sat on " * 20, max_tokens=60))
                assert drafted > 0


@pytest.fixture(scope="module")
def wrong_draft(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 whose later weights are zeros: another model of the same vocabulary."""
    content = bytearray(smollm2.read_bytes())
    start = len(content) // 2
    content[start:] = bytes(len(content) - start)
    path = tmp_path_factory.mktemp("draft") / "wrong.gguf"
    path.write_bytes(content)
    return path


def test_drafts_end_where_the_large_model_ends(smollm2: Path, tmp_path: Path) -> None:
    content, key = bytearray(smollm2.read_bytes()), b"tokenizer.ggml.eos_token_id"
    start = content.index(key) + len(key) + 4  # after the key comes its type
    with drafting(smollm2, smollm2) as plain:
        (comma,) = plain.tokenize(",")
        expected = draft_tokens(plain, ask(STORY, max_tokens=60, ignore_eos=True))
    content[start : start + 4] = comma.to_bytes(4, "little")
    (tmp_path / "draft.gguf").write_bytes(content)
    with drafting(smollm2, tmp_path / "draft.gguf") as opened:
        assert opened._draft.vocab.is_eos(comma)
        assert draft_tokens(opened, ask(STORY, max_tokens=60, ignore_eos=True)) == expected


@pytest.mark.needs("time")
def test_drafts_that_are_wrong_end(smollm2: Path, wrong_draft: Path) -> None:
    with drafting(smollm2, wrong_draft) as opened:
        n_computed = count_computed(opened)
        draft_tokens(opened, ask(f"{STORY} saw 1", max_tokens=100))
        assert 0 < len(n_computed) < 25
        for n in "23":
            draft_tokens(opened, ask(f"{STORY} saw {n}", max_tokens=50))
        assert len(n_computed) < 40


def test_a_draft_model_that_is_too_slow_drafts_nothing(smollm2: Path) -> None:
    with closing(load(smollm2, smollm2)) as opened:
        pin_costs(opened, lambda rows: 0.060 + 0.030 * rows, 0.060)
        draft_tokens(opened, ask(STORY, max_tokens=40))
        assert opened._draft.kv.cached_sequences == []


def test_another_vocabulary_is_refused_in_words(smollm2: Path, gemma3: Path) -> None:
    with pytest.raises(
        ModelLoadError,
        match=r"small cannot draft for m: the draft model's vocabulary differs .*262,144",
    ) as info:
        load(smollm2, gemma3)
    assert "--draft none" in (info.value.hint or "")


def test_the_catalogues_draft_model_is_left_out_with_a_warning(smollm2: Path, gemma3: Path) -> None:
    with closing(load(smollm2, gemma3, draft_option="")) as opened:
        assert opened.info.choices["draft"].value == "none"
        assert "vocabulary" in opened.info.warnings[0]
        assert opened._draft.shape is None
        assert answer(opened, ask()).text


@pytest.mark.parametrize("error", [ModelLoadError, OutOfMemoryError])
@pytest.mark.parametrize("fails_at", ["weights", "context"])
def test_the_catalogues_draft_model_that_cannot_be_loaded_is_left_out_with_a_warning(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type, fails_at: str
) -> None:
    damaged = smollm2
    if fails_at == "weights" and error is ModelLoadError:
        damaged = tmp_path / "damaged.gguf"
        damaged.write_bytes(smollm2.read_bytes()[:1_000_000])
    else:
        name = "open_context" if fails_at == "context" else "open_model"
        monkeypatch.setattr(draft_model, name, Mock(side_effect=error("not loaded")))
    with closing(load(smollm2, damaged, draft_option="", n_ctx=256)) as opened:
        assert opened.info.choices["draft"].value == "none"
        assert "small cannot draft for m: " in opened.info.warnings[0]
        assert answer(opened, ask()).text
    with pytest.raises(error):
        load(smollm2, damaged, n_ctx=256)


def test_the_draft_model_has_the_text_before_the_request_ends(
    engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, put = engine._draft, EventStream.put
    is_drafting: list[bool] = []

    def watch(stream: EventStream, event: Event | EngineError) -> None:
        is_drafting.append(any(c.in_use for c in model.kv.cached_sequences))
        put(stream, event)

    monkeypatch.setattr(EventStream, "put", watch)
    answer(engine, ask(STORY, max_tokens=30))
    assert any(is_drafting)
    assert not is_drafting[-1]


@pytest.mark.parametrize(
    ("draft", "warnings"), [("", ()), ("small", ("small cannot draft for m: x was changed",))]
)
def test_load_says_which_model_drafts(
    engine: LlamaEngine, smollm2: Path, draft: str, warnings: tuple[str, ...]
) -> None:
    assert engine.info.choices["draft"].value == "small"
    files = ModelFiles(name="m", paths=(str(smollm2),), draft=draft, no_draft="x was changed")
    with closing(load_engine(files, LoadOptions(n_ctx=256, n_parallel=1))) as opened:
        assert opened.info.choices["draft"] == Chosen("none", "x was changed")
        assert opened.info.warnings == warnings
