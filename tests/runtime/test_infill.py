"""Filling a gap: which tokens surround it, what is left out when there is no room, and who can do it."""

import pytest
from made_models import FIM, make_llama

from edgeinfer.errors import InvalidRequestError
from edgeinfer.runtime.engine import LlamaEngine
from edgeinfer.runtime.requests import GenerateRequest, Infill, InfillFile
from edgeinfer.runtime.scheduler.input_processor import infill_tokens

from .conftest import load as load_model

PRE, SUF, MID, REP, SEP = range(258, 263)
PLAIN = ("fim_pre", "fim_suf", "fim_mid")
FILES = (InfillFile(name="a.py", text="one"), InfillFile(name="b.py", text="two"))


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    engines: dict[tuple[str, ...], LlamaEngine] = {}

    def load_once(*fim: str) -> LlamaEngine:
        if fim not in engines:
            path = make_llama(tmp_path_factory.mktemp("fim") / "made.gguf", fim=fim)
            engines[fim] = load_model(path, n_ctx=256, n_parallel=1, n_threads=1)
        return engines[fim]

    yield load_once
    for engine in engines.values():
        engine.close()


def _spell(engine: LlamaEngine, gap: Infill, room: int = 200) -> bytes:
    return engine.detokenize(infill_tokens(gap, engine._loaded.vocab, room))


def test_what_is_before_and_behind_stands_between_its_tokens(load):
    engine = load(*FIM)
    tokens = infill_tokens(Infill(prefix="a", suffix="b"), engine._loaded.vocab, 200)
    assert tokens == [PRE, ord("a"), SUF, ord("b"), MID]
    assert engine.info.can_infill


def test_files_come_first_as_a_repository(load):
    said = _spell(load(*FIM), Infill(prefix="x", suffix="y", files=FILES))
    assert said == (
        b"<|repo_name|>repository\n<|file_sep|>a.py\none<|file_sep|>b.py\ntwo<|file_sep|>file\n"
        b"<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>"
    )


def test_without_a_token_for_it_a_rule_stands_between_files(load):
    said = _spell(load(*PLAIN), Infill(prefix="x", files=FILES))
    assert said == (
        b"\n\n--- a.py ---\n\none\n\n--- b.py ---\n\ntwo<|fim_prefix|>x<|fim_suffix|><|fim_middle|>"
    )


def test_marks_in_the_text_are_text(load):
    tokens = infill_tokens(Infill(prefix=FIM["fim_mid"]), load(*FIM)._loaded.vocab, 200)
    assert tokens.count(MID) == 1


@pytest.mark.parametrize("room", [3, 4, 10, 40, 100, 254])
def test_what_does_not_fit_is_left_out_far_from_the_gap(load, room):
    engine = load(*FIM)
    gap = Infill(prefix="p" * 300 + "P", suffix="S" + "s" * 300, files=FILES)
    said = _spell(engine, gap, room)
    assert len(infill_tokens(gap, engine._loaded.vocab, room)) == room
    if room > 10:
        assert b"P<|fim_suffix|>S" in said
    assert b"one" not in said


def test_the_last_files_are_kept(load):
    said = _spell(load(*FIM), Infill(prefix="x", files=FILES), 39)
    assert b"two" in said
    assert b"one" not in said


def test_a_text_longer_than_the_context_is_cut_and_leaves_room_for_the_answer(load):
    request = GenerateRequest(infill=Infill(prefix="x" * 5000, suffix="y" * 5000), max_tokens=100)
    (*_, end) = load(*FIM).submit(request)
    assert end.usage.prompt_tokens == 256 - 100


def test_a_model_without_the_tokens_says_so(load):
    engine = load()
    assert not engine.info.can_infill
    with pytest.raises(InvalidRequestError, match="fill-in-the-middle"):
        engine.submit(GenerateRequest(infill=Infill(prefix="x")))


def test_a_gap_and_a_prompt_are_two_requests(load):
    with pytest.raises(InvalidRequestError):
        load(*FIM).submit(GenerateRequest(prompt="x", infill=Infill(prefix="x")))
