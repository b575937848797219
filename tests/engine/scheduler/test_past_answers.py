"""Past answers that draft tokens are looked up in: found, bounded, kept apart by salt, and forgotten."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgeinfer.runtime.engine import LlamaEngine
from edgeinfer.runtime.events import Finished
from edgeinfer.runtime.prefix_cache.store import BlockStore, forget_conversation
from edgeinfer.runtime.requests import GenerateRequest, JsonSchema, Sampling
from edgeinfer.runtime.sampling import past_answers
from edgeinfer.runtime.sampling.past_answers import AnswerFile, PastAnswers

from .. import conftest as engines
from ..conftest import ask

ANSWER = [*range(100, 140)]
WORDS = ("bread", "moons", "rivers", "maps")


def found(file: AnswerFile | None, text: list[int]) -> list[int]:
    """The two tokens that followed the end of `text`."""
    place, length = file.find(np.array(text, np.int32))
    return file.ring[place : place + 2].tolist() if length else []


@pytest.fixture
def answers(tmp_path: Path) -> PastAnswers:
    return PastAnswers(tmp_path, b"secret")


def test_latest_occurrence_of_the_longest_end_is_found(answers: PastAnswers) -> None:
    answers.add("", "a", ANSWER)
    answers.add("", "b", [1, 2, *ANSWER[:10], 7, 8])
    file = answers.of("")
    assert found(file, ANSWER[:10]) == [7, 8]
    assert found(file, [2, *ANSWER[2:10]]) == [7, 8]
    assert found(file, ANSWER[:20]) == ANSWER[20:22]
    assert found(file, [9, 9, 9, *ANSWER[:4]]) == ANSWER[4:6]
    assert found(file, ANSWER[:3]) == []
    assert found(file, [5, 6, 7, 8, 9]) == []


def test_other_processes_find_what_was_added(answers: PastAnswers, tmp_path: Path) -> None:
    other = PastAnswers(tmp_path, b"secret")
    assert found(other.of(""), ANSWER[:8]) == []
    answers.add("", "a", ANSWER)
    assert found(other.of(""), ANSWER[:8]) == ANSWER[8:10]


def test_salts_share_nothing_and_names_say_nothing(answers: PastAnswers, tmp_path: Path) -> None:
    answers.add("alice", "a", ANSWER)
    assert found(answers.of("bob"), ANSWER[:8]) == []
    assert found(answers.of(""), ANSWER[:8]) == []
    names = [path.name for path in tmp_path.glob("answers/*")]
    assert len(names) == 3
    assert all(bytes.fromhex(name) and "alice" not in name for name in names)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("answers/*")} == {0o600}


def test_oldest_answers_are_overwritten(answers: PastAnswers) -> None:
    answers.add("", "a", ANSWER)
    for i in range(past_answers.RING // 50_000 + 1):
        answers.add("", "b", [1000 + (i + 7 * k) % 5000 for k in range(50_000)])
    assert found(answers.of(""), ANSWER[:8]) == []
    assert os.fstat(answers.of("")._descriptor).st_size < 4 << 20  # type: ignore[union-attr]


def test_least_recently_written_files_are_deleted(answers: PastAnswers, tmp_path: Path) -> None:
    for i in range(past_answers.MAX_FILES + 3):
        answers.add(str(i), "a", ANSWER)
    assert len(list(tmp_path.glob("answers/*"))) == past_answers.MAX_FILES
    assert found(answers.of(str(past_answers.MAX_FILES + 2)), ANSWER[:8]) == ANSWER[8:10]


def test_deleted_file_is_no_longer_read(answers: PastAnswers, tmp_path: Path) -> None:
    answers.add("", "a", ANSWER)
    for path in tmp_path.glob("answers/*"):
        path.unlink()
    assert found(answers.of(""), ANSWER[:8]) == []
    answers.add("", "a", ANSWER)
    assert found(answers.of(""), ANSWER[:8]) == ANSWER[8:10]


def test_file_open_to_others_is_not_used(answers: PastAnswers, tmp_path: Path) -> None:
    answers.add("", "a", ANSWER)
    answers.close()
    for path in tmp_path.glob("answers/*"):
        path.chmod(0o644)
    assert answers.of("") is None


def test_forgotten_conversation_is_erased_and_no_other(tmp_path: Path) -> None:
    blocks = BlockStore(tmp_path / "blocks").model("abc", {"kv_type": "f16"})
    other = [*range(200, 240)]
    blocks.answers.add("", "chat-1", ANSWER)
    blocks.answers.add("", "chat-2", other)
    blocks.answers.add("", "chat-1", ANSWER[::-1])
    assert forget_conversation(tmp_path / "blocks", "chat-1") >= 2 * 4 * len(ANSWER)
    file = blocks.answers.of("")
    assert found(file, ANSWER[:8]) == []
    assert found(file, ANSWER[::-1][:8]) == []
    assert found(file, other[:8]) == other[8:10]
    assert not np.isin(ANSWER, file.ring).any()
    assert forget_conversation(tmp_path / "blocks", "chat-1") == 0
    blocks.answers.of("another salt")  # a file without an answer
    assert forget_conversation(tmp_path / "blocks", "chat-1") == 0


SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "amount": {"type": "integer"}},
        "required": ["colour", "amount"],
        "additionalProperties": False,
    },
    "minItems": 6,
    "maxItems": 6,
}


@pytest.fixture(scope="module")
def engine(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaEngine]:
    opened = engines.load(smollm2, n_ctx=1024, n_parallel=4)
    opened.warm_up()
    opened.use_blocks(BlockStore(tmp_path_factory.mktemp("store") / "blocks"))
    yield opened
    opened.close()


def answer(engine: LlamaEngine, request: GenerateRequest, **fields: object) -> tuple[str, Finished]:
    found = engines.answer(engine, msgspec.structs.replace(request, **fields))
    return found.text, found.finished


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=0.8, seed=5)])
@pytest.mark.parametrize("schema", [None, SCHEMA])
def test_answer_with_drafts_equals_that_without(
    engine: LlamaEngine, sampling: Sampling, schema: dict[str, object] | None
) -> None:
    request = GenerateRequest(
        prompt="one red, two green, three red, four green, five red, six green. The list:",
        sampling=sampling,
        max_tokens=90,
        constraint=None if schema is None else JsonSchema(schema),
        conversation="chat-1",
        cache_salt=f"{sampling.seed} {schema is None}",
    )
    expected, plain = answer(engine, request, speculative="off", cache_on_disk=False)
    assert plain.timings.draft_tokens == 0
    for how in ("auto", "ngram"):
        text, _ = answer(engine, request, speculative=how)
        assert text == expected
    engine.flush_blocks()
    text, again = answer(engine, request, speculative="ngram")
    assert text == expected
    assert again.timings.draft_accepted_tokens > plain.usage.completion_tokens // 2


def test_batched_answers_with_drafts_equal_those_without(engine: LlamaEngine) -> None:
    texts: dict[str, list[str]] = {}
    for how in ("off", "auto"):
        engine.between_steps(engine._scheduler.kv.drop_idle)
        prompts = [f"{word} and tea, {word} and salt, {word} and" for word in WORDS]
        requests = [ask(p, max_tokens=60, speculative=how, cache_on_disk=False) for p in prompts]
        texts[how] = [found.text for found in engines.answers(engine, requests)]
    assert texts["auto"] == texts["off"]


def test_private_request_leaves_no_answer(engine: LlamaEngine) -> None:
    request = ask("Rivers and bridges:", max_tokens=24, cache_salt="own", ignore_eos=False)
    answer(engine, request, cache_prompt=False)
    answer(engine, request, cache_on_disk=False)
    engine.flush_blocks()
    file = engine._cache.blocks.answers.of("own")  # type: ignore[union-attr]
    assert not file.ring.any()
    answer(engine, request)
    engine.flush_blocks()
    assert np.count_nonzero(file.ring > 0) >= 24


def test_parked_engine_maps_no_answers_and_keeps_its_curve(engine: LlamaEngine) -> None:
    answer(engine, ask("Tea and salt:", max_tokens=16, ignore_eos=False))
    engine.flush_blocks()
    costs = engine._scheduler.executor.costs
    mapped = Path("/proc/self/maps").read_text().count("/answers/")  # other tests' engines map theirs
    assert mapped
    engine.park()
    assert Path("/proc/self/maps").read_text().count("/answers/") < mapped
    assert costs.seconds(1, 8) is not None
