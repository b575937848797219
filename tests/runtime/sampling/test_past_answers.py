"""Past answers that draft tokens are looked up in: found, bounded, kept apart by salt, and forgotten."""

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from other_processes import run_python

from edgeinfer.runtime.engine import LlamaEngine
from edgeinfer.runtime.events import Finished
from edgeinfer.runtime.prefix_cache.block_folder import BlockStore
from edgeinfer.runtime.prefix_cache.retention import forget_conversations
from edgeinfer.runtime.requests import GenerateRequest, JsonSchema, Sampling
from edgeinfer.runtime.sampling import past_answers
from edgeinfer.runtime.sampling.past_answers import AnswerFile, PastAnswers

from .. import conftest as engines
from ..conftest import ask

ANSWER = [*range(100, 140)]
WORDS = ("bread", "moons", "rivers", "maps")


def find_draft(file: AnswerFile | None, text: list[int]) -> list[int]:
    """The two tokens that followed the end of `text`."""
    position, length = file.find(np.array(text, np.int32))
    return file.ring[position : position + 2].tolist() if length else []


@pytest.fixture
def answers(tmp_path: Path) -> PastAnswers:
    return PastAnswers(tmp_path, b"secret")


def test_latest_occurrence_of_the_longest_end_is_found(answers: PastAnswers) -> None:
    answers.add("", "a", ANSWER)
    answers.add("", "b", [1, 2, *ANSWER[:10], 7, 8])
    file = answers.of("")
    assert find_draft(file, ANSWER[:10]) == [7, 8]
    assert find_draft(file, [2, *ANSWER[2:10]]) == [7, 8]
    assert find_draft(file, ANSWER[:20]) == ANSWER[20:22]
    assert find_draft(file, [9, 9, 9, *ANSWER[:4]]) == ANSWER[4:6]
    assert find_draft(file, ANSWER[:3]) == []
    assert find_draft(file, [5, 6, 7, 8, 9]) == []


def test_other_processes_find_what_was_added(answers: PastAnswers, tmp_path: Path) -> None:
    other = PastAnswers(tmp_path, b"secret")
    assert find_draft(other.of(""), ANSWER[:8]) == []
    answers.add("", "a", ANSWER)
    assert find_draft(other.of(""), ANSWER[:8]) == ANSWER[8:10]


def test_salts_share_nothing_and_names_say_nothing(answers: PastAnswers, tmp_path: Path) -> None:
    answers.add("alice", "a", ANSWER)
    assert find_draft(answers.of("bob"), ANSWER[:8]) == []
    assert find_draft(answers.of(""), ANSWER[:8]) == []
    names = [path.name for path in tmp_path.glob("answers/*")]
    assert len(names) == 3
    assert all(bytes.fromhex(name) and "alice" not in name for name in names)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("answers/*")} == {0o600}


def test_oldest_answers_are_overwritten(answers: PastAnswers) -> None:
    answers.add("", "a", ANSWER)
    for i in range(past_answers.RING // 50_000 + 1):
        answers.add("", "b", [1000 + (i + 7 * k) % 5000 for k in range(50_000)])
    assert find_draft(answers.of(""), ANSWER[:8]) == []
    assert os.fstat(answers.of("")._descriptor).st_size < 4 << 20  # type: ignore[union-attr]


def test_least_recently_written_files_are_deleted(answers: PastAnswers, tmp_path: Path) -> None:
    for i in range(past_answers.MAX_FILES + 3):
        answers.add(str(i), "a", ANSWER)
    assert len(list(tmp_path.glob("answers/*"))) == past_answers.MAX_FILES
    assert find_draft(answers.of(str(past_answers.MAX_FILES + 2)), ANSWER[:8]) == ANSWER[8:10]


def test_deleted_file_is_no_longer_read(answers: PastAnswers, tmp_path: Path) -> None:
    answers.add("", "a", ANSWER)
    for path in tmp_path.glob("answers/*"):
        path.unlink()
    assert find_draft(answers.of(""), ANSWER[:8]) == []
    answers.add("", "a", ANSWER)
    assert find_draft(answers.of(""), ANSWER[:8]) == ANSWER[8:10]


def test_file_open_to_others_is_not_used(answers: PastAnswers, tmp_path: Path) -> None:
    answers.add("", "a", ANSWER)
    answers.close()
    for path in tmp_path.glob("answers/*"):
        path.chmod(0o644)
    assert answers.of("") is None


def test_forgotten_conversation_is_erased_and_no_other(tmp_path: Path) -> None:
    blocks = BlockStore(tmp_path / "blocks").open_folder("abc", {"kv_type": "f16"})
    other = [*range(200, 240)]
    blocks.answers.add("", "chat-1", ANSWER)
    blocks.answers.add("", "chat-2", other)
    blocks.answers.add("", "chat-1", ANSWER[::-1])
    assert forget_conversations(tmp_path / "blocks", "chat-1") >= 2 * 4 * len(ANSWER)
    file = blocks.answers.of("")
    assert find_draft(file, ANSWER[:8]) == []
    assert find_draft(file, ANSWER[::-1][:8]) == []
    assert find_draft(file, other[:8]) == other[8:10]
    assert not np.isin(ANSWER, file.ring).any()
    assert forget_conversations(tmp_path / "blocks", "chat-1") == 0
    blocks.answers.of("another salt")  # a file without an answer
    assert forget_conversations(tmp_path / "blocks", "chat-1") == 0


def test_a_file_that_cannot_be_changed_does_not_keep_the_others(tmp_path: Path) -> None:
    blocks = BlockStore(tmp_path / "blocks").open_folder("abc", {"kv_type": "f16"})
    for salt in ("a", "b", "c"):
        blocks.answers.add(salt, "chat-1", ANSWER)
    files = sorted(tmp_path.glob("blocks/*/answers/*"))
    files[0].chmod(0o644)
    files[1].unlink()
    files[1].symlink_to(tmp_path / "elsewhere")
    assert forget_conversations(tmp_path / "blocks", "chat-1") > 0
    assert [path.exists() for path in files] == [False, False, True]
    assert not (tmp_path / "elsewhere").exists()
    assert not np.isin(ANSWER, AnswerFile(files[2]).ring).any()


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
    opened.open_prefix_cache(BlockStore(tmp_path_factory.mktemp("store") / "blocks"))
    yield opened
    opened.close()


def answer(engine: LlamaEngine, request: GenerateRequest, **fields: object) -> tuple[str, Finished]:
    reply = engines.answer(engine, replace(request, **fields))
    return reply.text, reply.finish


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
    for method in ("auto", "ngram"):
        text, _ = answer(engine, request, speculative=method)
        assert text == expected
    engine.flush_blocks()
    text, again = answer(engine, request, speculative="ngram")
    assert text == expected
    assert again.timings.draft_accepted_tokens > plain.usage.completion_tokens // 2


def test_batched_answers_with_drafts_equal_those_without(engine: LlamaEngine) -> None:
    texts: dict[str, list[str]] = {}
    for speculative in ("off", "auto"):
        engine.between_steps(engine._core.kv.drop_idle)
        prompts = [f"{word} and tea, {word} and salt, {word} and" for word in WORDS]
        requests = [
            ask(p, max_tokens=60, speculative=speculative, cache_on_disk=False) for p in prompts
        ]
        texts[speculative] = [reply.text for reply in engines.answers(engine, requests)]
    assert texts["auto"] == texts["off"]


def test_private_request_leaves_no_answer(engine: LlamaEngine) -> None:
    request = ask("Rivers and bridges:", max_tokens=24, cache_salt="own", ignore_eos=False)
    answer(engine, request, cache_prompt=False)
    answer(engine, request, cache_on_disk=False)
    engine.flush_blocks()
    file = engine._prefix_cache.folder.answers.of("own")  # type: ignore[union-attr]
    assert not file.ring.any()
    answer(engine, request)
    engine.flush_blocks()
    assert np.count_nonzero(file.ring > 0) >= 24


def open_answers() -> int:
    """Count this process's open files of past answers, those of other tests' engines included."""
    links = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
    return sum("/answers/" in os.readlink(link) for link in links if os.path.islink(link))


def test_parked_engine_opens_no_answers_and_keeps_its_curve(engine: LlamaEngine) -> None:
    answer(engine, ask("Tea and salt:", max_tokens=16, ignore_eos=False))
    engine.flush_blocks()
    costs = engine._core.executor.step_costs
    before = open_answers()
    assert before
    engine.park()
    assert open_answers() < before
    assert costs.seconds(1, 8) is not None


OWNERS = (2, 3, 4)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of 512 tokens, in pages of 16 words."""
    monkeypatch.setattr(past_answers, "RING", 512)
    monkeypatch.setattr(past_answers, "_RING_AT", 1 + 2 * 512)
    monkeypatch.setattr(past_answers, "_PAGE", 16)


def tokens_of(owner: int, n: int, rng: random.Random) -> list[int]:
    """An answer in words that no other owner uses."""
    return [owner * 1000 + rng.randrange(400) for _ in range(n)]


def is_left(file: AnswerFile, owner: int) -> bool:
    """Return whether a token of this owner is in the ring, or a table entry of a text that is not."""
    ring = file.ring
    if (ring // 1000 == owner).any() or -owner in ring.tolist():
        return True
    for number, n in enumerate((8, 4)):
        table = file._read(1 + number * past_answers.RING, past_answers.RING)
        for key in np.flatnonzero(table).tolist():
            gram = ring[table[key] - n : table[key]].tolist()
            if min(gram) < 0 or past_answers._hash(gram) != key:
                return True
    return False


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", range(20))
def test_nothing_of_a_forgotten_answer_is_left(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    file = AnswerFile(tmp_path / "answers")
    for _ in range(rng.randrange(5, 60)):
        owner = rng.choice(OWNERS)
        file.add(owner, tokens_of(owner, rng.choice([1, 3, 20, 60, 128, 300]), rng))
    counts = {owner: int((file.ring // 1000 == owner).sum()) for owner in OWNERS}
    for owner in OWNERS[:2]:
        file.forget([owner])
        assert not is_left(file, owner)
    assert (file.ring // 1000 == OWNERS[2]).sum() == counts[OWNERS[2]]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("action", ["add", "forget"])
def test_nothing_of_a_forgotten_answer_is_left_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    """The process dies before its n-th page reaches the file, for every n."""

    class Killed(Exception):
        pass

    pages = 0

    def write_pages(self: AnswerFile, word: int, values: np.ndarray | np.int32) -> None:
        nonlocal pages
        values = np.atleast_1d(values)
        for i in range(0, len(values), past_answers._PAGE):
            pages -= 1
            if pages == 0:
                raise Killed
            os.pwrite(self._descriptor, values[i : i + past_answers._PAGE].tobytes(), (word + i) * 4)

    for n in range(1, 60):
        rng = random.Random(7)
        file = AnswerFile(tmp_path / str(n))
        for owner in (2, 3, 4, 2, 3, 4, 2):
            file.add(owner, tokens_of(owner, rng.choice([40, 90]), rng))
        monkeypatch.setattr(AnswerFile, "_write", write_pages)
        pages = n
        with contextlib.suppress(Killed):
            file.add(4, tokens_of(4, 120, rng)) if action == "add" else file.forget([2])
        monkeypatch.undo()
        monkeypatch.setattr(past_answers, "RING", 512)
        monkeypatch.setattr(past_answers, "_RING_AT", 1 + 2 * 512)
        for owner in (2, 3):
            file.forget([owner])
            assert not (file.ring // 1000 == owner).any(), n


@pytest.mark.usefixtures("small")
def test_ends_of_answers_that_a_former_version_left_are_erased(tmp_path: Path) -> None:
    file = AnswerFile(tmp_path / "answers")
    file.add(2, tokens_of(2, 100, random.Random(1)))
    file._write(past_answers._RING_AT, np.array([-3, 3001, 3002, -1], np.int32))
    file.forget([4])
    assert not (file.ring // 1000 == 2).any()
    assert file.ring[:4].tolist() == [-3, 3001, 3002, -1]


def test_two_processes_that_add_and_forget_leave_nothing(tmp_path: Path) -> None:
    code = f"""
import random, sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from pathlib import Path
from edgeinfer.runtime.sampling import past_answers
past_answers.RING, past_answers._RING_AT = 512, 1 + 2 * 512
file = past_answers.AnswerFile(Path({str(tmp_path / "answers")!r}))
own, rng = int(sys.argv[1]), random.Random(sys.argv[1])
for i in range(300):
    file.add(own, [own * 1000 + rng.randrange(400) for _ in range(rng.choice([3, 30, 90]))])
    if i % 7 == 0:
        file.forget([own])
file.forget([own])
"""
    both = [subprocess.Popen([sys.executable, "-c", code, str(owner)]) for owner in (2, 3)]
    assert [process.wait(120) for process in both] == [0, 0]
    ring = AnswerFile(tmp_path / "answers")._read(1 + 2 * 512, 512)
    assert not (ring > 0).any()


def test_a_full_tmpfs_costs_drafts_and_no_process(small_disk: Path) -> None:
    code = """
import os, sys
from pathlib import Path
import numpy as np
from edgeinfer.runtime.sampling.past_answers import PastAnswers
answers = PastAnswers(Path(sys.argv[1]), b"secret")
file = answers.of("")
with open(Path(sys.argv[1], "fill"), "wb", buffering=0) as fill:
    try:
        while fill.write(bytes(4096)):
            pass
    except OSError:
        pass
assert file.find(np.arange(100, dtype=np.int32)) == (0, 0)
assert not file.ring.any()
try:
    answers.add("", "a", range(100, 140))
    raise SystemExit("there was room")
except OSError:
    pass
"""
    assert subprocess.run([sys.executable, "-c", code, small_disk], check=False).returncode == 0


def test_answers_are_added_until_the_process_has_ended(answers: PastAnswers, tmp_path: Path) -> None:
    """An engine may be closed, and write, after the interpreter has run its finalizers."""
    run_python(
        "import atexit, pathlib, sys; from edgeinfer.runtime.sampling.past_answers import PastAnswers; "
        "answers = PastAnswers(pathlib.Path(sys.argv[1]), b'secret'); "
        f"atexit.register(answers.add, '', 'a', {ANSWER}); answers.of('')",
        tmp_path,
    )
    assert find_draft(answers.of(""), ANSWER[:8]) == ANSWER[8:10]
