"""Loading, sampling, log-probabilities, embeddings and validation on the real models."""

import math
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from made_decoders import make_qwen2vl
from made_models import make_llama

from edgeinfer.cli.main import main
from edgeinfer.errors import (
    ContextLengthError,
    DecodeError,
    InvalidRequestError,
    ModelLoadError,
    OutOfMemoryError,
    UsageError,
)
from edgeinfer.runtime import memory_plan
from edgeinfer.runtime.engine import LlamaEngine, load_engine
from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.llama.context import Batch
from edgeinfer.runtime.options import Chosen, LoadOptions, ModelFiles
from edgeinfer.runtime.requests import Sampling

from .conftest import answer, ask, load, machine

SMALL = LoadOptions(n_ctx=512, n_parallel=2)


def files(path: Path) -> ModelFiles:
    return ModelFiles(name=path.stem, paths=(str(path),))


def test_build_info_names_the_variant_and_the_commit() -> None:
    info = libllama.build_info()
    assert info.llama_version
    assert info.ggml_commit
    assert any(flag.startswith(("AVX", "SSE", "NEON")) for flag in info.flags)


def test_llama_cpp_prints_nothing(smollm2: Path) -> None:
    program = (
        "from edgeinfer.runtime.engine import load_engine\n"
        "from edgeinfer.runtime.options import LoadOptions, ModelFiles\n"
        f"load_engine(ModelFiles(name='m', paths=({str(smollm2)!r},)), LoadOptions(n_ctx=512, "
        f"n_parallel=1)).close()\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("", "")


_CLOSE_WHILE_TOKENIZING = """
import sys
import threading

from edgeinfer.errors import EngineClosedError
from edgeinfer.runtime.engine import load_engine
from edgeinfer.runtime.options import LoadOptions, ModelFiles

files = ModelFiles(name="m", paths=(sys.argv[1],))
engine = load_engine(files, LoadOptions(n_ctx=2048, n_parallel=1))
text = "The capital of France is Paris. " * 4000
barrier = threading.Barrier(5)
problems = []


def tokenize():
    barrier.wait()
    try:
        while True:
            engine.tokenize(text)
    except EngineClosedError as error:
        problems.append(str(error))


threads = [threading.Thread(target=tokenize) for _ in range(4)]
for thread in threads:
    thread.start()
barrier.wait()
engine.tokenize(text)  # so that the threads are inside a call, too
engine.close()
for thread in threads:
    thread.join()
print(*problems, sep="\\n")
"""


def test_close_waits_for_threads_that_tokenize(smollm2: Path) -> None:
    command = [sys.executable, "-c", _CLOSE_WHILE_TOKENIZING, str(smollm2)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("the engine is closed\n" * 4, "")


def test_info_tells_sizes_and_reasons(smol: LlamaEngine, gemma: LlamaEngine) -> None:
    for engine, architecture, n_vocab in ((smol, "llama", 49_152), (gemma, "gemma3", 262_144)):
        info = engine.info
        assert (info.architecture, info.n_vocab) == (architecture, n_vocab)
        assert info.n_ctx == 2048
        assert info.weights_bytes > 50_000_000
        assert info.kv_bytes > 1_000_000
        assert info.compute_bytes > 1_000_000
        assert all(chosen.reason for chosen in info.choices.values())
        names = {"n_threads", "n_parallel", "n_ctx", "gpu_layers", "flash_attention"}
        assert names <= info.choices.keys()


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0"])
def test_every_cache_type_answers(gemma3: Path, kv_type: str) -> None:
    with closing(load(gemma3, n_ctx=256, n_parallel=1, kv_type=kv_type)) as engine:
        assert answer(engine, ask("2, 4, 6, 8,")).text.startswith(" 10")  # far from a tie in 4 bits too


@pytest.mark.parametrize("flash", ["on", "off"])
def test_flash_attention_on_and_off_answer(smollm2: Path, flash: str) -> None:
    with closing(load(smollm2, n_ctx=256, n_parallel=1, flash_attention=flash)) as engine:
        assert "Paris" in answer(engine, ask()).text


def test_smallest_context_holds_its_batches(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "choose_cells", lambda *_: Chosen(256, "a test wants few"))
    with closing(load(smollm2, n_ctx=200, n_parallel=1)) as engine:
        usage = answer(engine, ask("word " * 190, max_tokens=100)).finish.usage
        assert usage.prompt_tokens + usage.completion_tokens == 200


def test_weights_larger_than_memory_are_read_from_the_disk_with_a_warning(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine with 80 MiB for weights of 92 MiB, its disk at 48.3 MB/s."""
    monkeypatch.setattr("edgeinfer.runtime.llama.model.read_machine", lambda: machine(80 << 20, 2))
    monkeypatch.setattr("edgeinfer.runtime.llama.model.read_rate", lambda path: 48.3e6)
    monkeypatch.setattr("sys.stdin", None)
    asked = ["run", str(smollm2), "The capital of France is", "--raw", "--max-tokens", "4"]
    assert main([*asked, "--temperature", "0"]) == 0
    out, err = capsys.readouterr()
    assert "Paris" in out
    assert err.startswith("warning: weights of 96.6 MB do not fit into the 83.9 MB of memory")
    assert "a token in 2.0 s: 96.6 MB a token at 48.3 MB/s (measured just now)" in err


def test_model_without_shift_refuses_overflow(tmp_path: Path, smollm2: Path) -> None:
    """llama.cpp asserts where M-RoPE positions are moved, which ends the process."""
    with closing(load(make_qwen2vl(tmp_path / "m.gguf", smollm2), n_ctx=512)) as engine:
        with pytest.raises(InvalidRequestError, match="cannot be shifted") as refused:
            answer(engine, ask(overflow="shift"))
        assert refused.value.param == "overflow"
        assert answer(engine, ask(max_tokens=1000)).finish.reason == "length"


@pytest.mark.parametrize(
    ("name", "value"),
    [("n_ctx", -1), ("n_parallel", 1000), ("n_threads", -2), ("n_batch", 0), ("gpu_layers", -4)],
)
def test_options_out_of_range_are_refused(smollm2: Path, name: str, value: int) -> None:
    with pytest.raises(UsageError):
        load(smollm2, **{name: value})


def test_load_errors_name_the_cause(tmp_path: Path, smollm2: Path) -> None:
    with pytest.raises(ModelLoadError, match="there is no"):
        load(tmp_path / "none.gguf")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelLoadError, match="could not load"):
        load(broken)
    with pytest.raises(OutOfMemoryError, match="MiB"):
        load(smollm2, n_ctx=1 << 24)


def test_progress_reaches_the_end(smollm2: Path) -> None:
    seen: list[tuple[str, float | None]] = []
    load_engine(files(smollm2), SMALL, lambda stage, share: seen.append((stage, share))).close()
    shares = [share for stage, share in seen if stage == "loading weights" and share is not None]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert seen[-1][0] == "making a context"


def test_logprobs_are_a_distribution_and_greedy_takes_the_best(smol: LlamaEngine) -> None:
    found = answer(smol, ask(logprobs=20, max_tokens=6))
    entries = found.logprobs
    assert len(entries) == 6
    for entry in entries:
        assert entry.chosen == entry.top[0]
        values = [alternative.logprob for alternative in entry.top]
        assert values == sorted(values, reverse=True)
        assert len(values) == 20
        assert 0 < sum(math.exp(v) for v in values) <= 1.0 + 1e-5
    assert b"".join(e.chosen.piece for e in entries).decode() == found.text


def test_logprobs_are_of_the_unbiased_model(smol: LlamaEngine) -> None:
    best = answer(smol, ask(logprobs=0, max_tokens=1)).logprobs[0].chosen
    banned = Sampling(temperature=0, logit_bias={best.token_id: -math.inf})
    other = answer(smol, ask(logprobs=1, max_tokens=1, sampling=banned)).logprobs[0]
    assert other.chosen.token_id != best.token_id
    assert other.top[0].token_id == best.token_id
    assert other.top[0].logprob == pytest.approx(best.logprob, abs=1e-4)


def test_stop_strings_across_token_borders(smol: LlamaEngine) -> None:
    whole = answer(smol, ask(max_tokens=24)).text
    stop = whole[5:9]
    found = answer(smol, ask(max_tokens=24, stop=(stop,)))
    assert found.text == whole[: whole.index(stop)]
    end = found.finish
    assert (end.reason, end.stop_sequence) == ("stop", stop)


def test_stop_strings_of_the_model_apply(smollm2: Path) -> None:
    with closing(
        load_engine(ModelFiles(name="m", paths=(str(smollm2),), stop=("Paris",)), SMALL)
    ) as engine:
        assert "Paris" not in answer(engine, ask(max_tokens=20)).text


def test_seeds_repeat_and_differ(smol: LlamaEngine) -> None:
    def say(seed: int) -> str:
        return answer(smol, ask(sampling=Sampling(temperature=1.2, seed=seed), max_tokens=16)).text

    assert say(1) == say(1)
    assert len({say(seed) for seed in range(5)}) == 5


def test_embeddings_batched_equal_unbatched(smol: LlamaEngine) -> None:
    texts = [f"sentence number {i} " * (1 + i % 3) for i in range(40)]
    together = smol.embed(texts)
    for i in (0, 20, 39):
        alone = smol.embed([texts[i]])[0]
        assert float(np.dot(alone, together[i])) > 0.999


def test_embedding_refuses_invalid_input(smol: LlamaEngine) -> None:
    with pytest.raises(InvalidRequestError):
        smol.embed([""])
    with pytest.raises(InvalidRequestError):
        smol.embed([[10**9]])
    with pytest.raises(ContextLengthError):
        smol.embed(["word " * 5000])
    with pytest.raises(InvalidRequestError):
        smol.rerank("query", ["document"])


@pytest.mark.parametrize(("n_chars", "is_beyond"), [(300, False), (600, True), (64 << 20, True)])
def test_prompt_beyond_the_trained_context_is_not_told_to_load_a_larger_one(
    tmp_path: Path, n_chars: int, is_beyond: bool
) -> None:
    path = make_llama(tmp_path / "m.gguf", 512)
    with (
        closing(load(path, n_ctx=256, n_parallel=1)) as engine,
        pytest.raises(ContextLengthError) as caught,
    ):
        answer(engine, ask("x" * n_chars))
    beyond = "shorten the prompt or use another model: this one was trained on 512 tokens"
    assert caught.value.hint == (beyond if is_beyond else None)


def test_pooling_is_the_models_own(tmp_path: Path) -> None:
    vectors = {}
    for name, number in (("unnamed", 0), ("mean", 1), ("cls", 2), ("last", 3)):
        path = make_llama(tmp_path / f"{name}.gguf", pooling=number)
        with closing(load(path, n_ctx=256, n_parallel=1)) as engine:
            assert engine.info.choices["pooling"].value == (number or 1)
            vectors[name] = engine.embed(["one two three"])[0]
    assert vectors["mean"] == pytest.approx(vectors["unnamed"], abs=1e-4)
    assert vectors["cls"] != pytest.approx(vectors["last"], abs=1e-3)
    assert vectors["mean"] != pytest.approx(vectors["last"], abs=1e-3)


def test_batch_refuses_input_that_aborts_llama_cpp() -> None:
    batch = Batch(capacity=4, max_outputs=2, n_vocab=10, n_seq_max=2, n_cells=8)
    for bad in (
        {"tokens": [], "pos": 0, "seq_id": 0, "outputs": 0},
        {"tokens": [1] * 5, "pos": 0, "seq_id": 0, "outputs": 0},
        {"tokens": [10], "pos": 0, "seq_id": 0, "outputs": 0},
        {"tokens": [-1], "pos": 0, "seq_id": 0, "outputs": 0},
        {"tokens": [1], "pos": 8, "seq_id": 0, "outputs": 0},
        {"tokens": [1], "pos": -1, "seq_id": 0, "outputs": 0},
        {"tokens": [1], "pos": 0, "seq_id": 2, "outputs": 0},
        {"tokens": [1] * 3, "pos": 0, "seq_id": 0, "outputs": 3},
    ):
        with pytest.raises(DecodeError):
            batch.add(**bad)  # type: ignore[arg-type]
