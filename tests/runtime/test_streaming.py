"""Weights that are streamed, by plans of the tests: results are those of mapped weights, to the last bit."""

import contextlib
import ctypes
import fcntl
import hashlib
import mmap
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import llama_cpp
import made_families
import pytest
from made_families import FAMILIES, Family, make_family
from msgspec.structs import replace
from other_processes import run, wait_until

from edgeinfer.errors import DecodeError
from edgeinfer.runtime.engine import LlamaEngine, load_engine
from edgeinfer.runtime.llama import libllama, streaming
from edgeinfer.runtime.llama.context import Batch
from edgeinfer.runtime.llama.mappings import areas
from edgeinfer.runtime.llama.model import LlamaModel, load_model
from edgeinfer.runtime.memory_plan import StreamingPlan
from edgeinfer.runtime.options import LoadOptions, ModelFiles

from ..conftest import ROOT
from .conftest import answer, answers, ask

MIB = 1 << 20
N_EXPERTS = 16
_E, _WIDE = made_families.E, 12288
#: Bytes of a weight that is streamed, and of an expert; what a plan of the tests streams.
TENSOR_BYTES, EXPERT_BYTES = 4 * _E * _WIDE, 4 * _E * 2048
STREAMED_BYTES = 60 * MIB
#: madvise(2), since Linux 5.4.
MADV_PAGEOUT = 21

pytestmark = pytest.mark.skipif(
    not libllama.build_info().kernels, reason="no kernels of our own for this processor"
)


@pytest.fixture(scope="module", params=["dense", "mixture"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 100 MB of random weights, each layer its own."""
    small = FAMILIES["Mixtral (a mixture of experts)" if request.param == "mixture" else "Llama"]
    wide = 2048 if request.param == "mixture" else _WIDE
    shapes = dict(small.layers(0))
    for name, shape in shapes.items():
        sizes = [wide if n == made_families.FF else n for n in shape]
        shapes[name] = tuple(N_EXPERTS if n == made_families.EXPERTS else n for n in sizes)
    keys = {"expert_count": N_EXPERTS, "expert_used_count": 3} if "mixture" in request.param else {}
    family = Family("llama", small.whole, lambda _: shapes, keys, n_layers=4 if keys else 12)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(FAMILIES, "large", family)
        patched.setattr(made_families, "FF", wide)
        return make_family(tmp_path_factory.mktemp("large") / f"{request.param}.gguf", "large")


@pytest.fixture(autouse=True)
def keep_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no plan follow the memory that this machine has free."""
    monkeypatch.setattr(streaming, "_MEMORY_S", 1e9)


def is_mixture(model: Path) -> bool:
    return model.stem.startswith("mixture")


def plan_for(model: Path) -> StreamingPlan:
    """A plan that streams half of the weights, or has room for a third of the experts."""
    if is_mixture(model):
        return StreamingPlan(0, N_EXPERTS * 4 * EXPERT_BYTES, 0)
    return StreamingPlan(0, 8 * MIB, STREAMED_BYTES)


def least_plan(model: Path) -> StreamingPlan:
    """One with a slot for one weight at a time, or slots for four experts."""
    if is_mixture(model):
        return StreamingPlan(0, 5 * EXPERT_BYTES, 0)
    return StreamingPlan(0, TENSOR_BYTES + 2 * os.sysconf("SC_PAGESIZE"), 1 << 40)


def load(path: Path, **options: object) -> LlamaEngine:
    settings = {"n_ctx": 256, "n_parallel": 4, "n_threads": 2, **options}
    return load_engine(ModelFiles(name="x", paths=(str(path),)), LoadOptions(**settings))  # type: ignore[arg-type]


def stream(loaded: LlamaModel, path: Path, plan: StreamingPlan) -> None:
    streaming.start(loaded, (str(path),), plan)
    assert streaming.active is not None


@contextlib.contextmanager
def streamed(path: Path, plan: StreamingPlan | None, **options: object) -> Iterator[LlamaEngine]:
    with closing(load(path, **options)) as engine:
        if plan is not None:
            engine.between_steps(lambda: stream(engine._loaded, path, plan))
        yield engine


def digest(path: Path, plan: StreamingPlan | None) -> str:
    """A digest of the logits of a prompt, of single tokens, and of two sequences in turns."""
    loaded = load_model(
        ModelFiles(name="x", paths=(str(path),)), LoadOptions(n_ctx=256, n_parallel=4, n_threads=3)
    )
    logits, n_vocab = hashlib.sha256(), loaded.vocab.n_vocab
    try:
        if plan is not None:
            stream(loaded, path, plan)
        context = loaded.llama_context()
        batch = Batch.of(context, max_outputs=2)
        chunks = [(0, 70), *((70 + i, 71 + i) for i in range(6)), (76, 80)]
        for seq_ids in ((0,), (0, 1)):
            context.clear()
            for start, stop in chunks:
                batch.clear()
                for seq_id in seq_ids:
                    tokens = [(7 * i + seq_id) % n_vocab for i in range(start, stop)]
                    batch.add(tokens, start, seq_id, outputs=1)
                assert batch.decode(context) == 0
                logits.update(context.all_logits(len(seq_ids), n_vocab).tobytes())
        return logits.hexdigest()
    finally:
        loaded.free()


def test_logits_are_those_of_mapped_weights(model: Path) -> None:
    expected = digest(model, None)
    assert digest(model, plan_for(model)) == expected
    assert digest(model, least_plan(model)) == expected


def test_what_is_streamed_is_counted(model: Path) -> None:
    plan = plan_for(model)
    with streamed(model, plan) as engine:
        answer(engine, ask("The river", max_tokens=4))
        held, before = streaming.statistics(), engine.metrics()
        if is_mixture(model):
            assert 0 < held.expert_slot_bytes <= plan.slot_bytes
        else:
            assert abs(held.streamed_bytes - STREAMED_BYTES) <= TENSOR_BYTES / 2
            assert held.pinned_bytes + held.streamed_bytes > model.stat().st_size - 2 * MIB
        answer(engine, ask("A mountain", max_tokens=4))
        assert streaming.statistics().streamed_bytes_total > held.streamed_bytes_total
        assert engine.metrics().streamed_bytes_total > before.streamed_bytes_total > 0
    assert streaming.statistics().streamed_bytes_total == 0


def test_requests_at_once_drafts_and_embeddings(model: Path) -> None:
    prompts = ["one two one two one two one", "the sea", "aaaa aaaa aaaa", "x = x + 1"]
    requests = [ask(prompt, max_tokens=12) for prompt in prompts]

    def texts_and_vectors(plan: StreamingPlan | None) -> tuple[list[str], list[list[float]]]:
        with streamed(model, plan) as engine:
            texts = [reply.text for reply in answers(engine, requests)]
            vectors = engine.embed(["a river", "two rivers"])
            return [*texts, answer(engine, requests[0]).text], vectors

    expected = texts_and_vectors(None)
    assert texts_and_vectors(plan_for(model)) == expected
    assert texts_and_vectors(least_plan(model)) == expected


def test_a_file_that_is_deleted_is_still_read(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(model, tmp_path / model.name))
    with streamed(copy, plan_for(copy)) as engine:
        before = answer(engine, ask()).text
        copy.unlink()
        assert answer(engine, ask()).text == before


@pytest.mark.parametrize("during_a_step", [False, True])
def test_a_file_that_becomes_shorter_is_an_error_in_words(
    model: Path, tmp_path: Path, during_a_step: bool
) -> None:
    copy = Path(shutil.copy(model, tmp_path / model.name))
    with streamed(copy, least_plan(copy)) as engine:
        answer(engine, ask())
        reads = streaming.statistics().streamed_bytes_total
        cut = threading.Thread(target=os.truncate, args=(copy, MIB))
        if not during_a_step:
            cut.start()
            cut.join()
        events = engine.submit(ask(max_tokens=200))
        if during_a_step:
            while streaming.statistics().streamed_bytes_total == reads:
                continue
            cut.start()
        with pytest.raises(DecodeError, match="is shorter than when it was loaded"):
            list(events)
        with pytest.raises(DecodeError, match=str(copy)):
            answer(engine, ask())
        cut.join()


def test_a_file_that_is_written_to_is_an_error_in_words(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(model, tmp_path / model.name))
    with streamed(copy, plan_for(copy)) as engine:
        answer(engine, ask())
        with copy.open("r+b") as file:
            file.seek(-MIB, os.SEEK_END)
            file.write(bytes(1000))
        with pytest.raises(DecodeError, match="has been written to since it was loaded"):
            answer(engine, ask())


def test_a_read_that_fails_is_an_error_in_words_and_the_next_request_reads_again(model: Path) -> None:
    others = numbers_of(model)
    with streamed(model, least_plan(model)) as engine:
        expected = answer(engine, ask()).text
        files = [n for n in numbers_of(model) if n not in others]
        kept = {n: os.dup(n) for n in files}
        memory = os.open("/proc/self/mem", os.O_RDONLY)  # reads of its first pages fail
        for n in files:
            os.dup2(memory, n)
        with pytest.raises(DecodeError, match="could not be read: Input/output error"):
            answer(engine, ask())
        for n, saved in kept.items():
            os.dup2(saved, n)
            os.close(saved)
        os.close(memory)
        assert answer(engine, ask()).text == expected


def test_a_file_system_without_direct_reads_is_read_through_the_page_cache(model: Path) -> None:
    with streamed(model, None) as engine:
        expected = answer(engine, ask()).text
    with streamed(model, least_plan(model)) as engine:
        direct = [n for n in numbers_of(model) if fcntl.fcntl(n, fcntl.F_GETFL) & os.O_DIRECT]
        for n in direct:
            fcntl.fcntl(n, fcntl.F_SETFL, 0)  # as a reader does if a direct read is refused
        assert answer(engine, ask()).text == expected
    assert not set(direct) & set(numbers_of(model))


PLAN = StreamingPlan(0, 8 * MIB, STREAMED_BYTES)


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[tuple[Path, mmap.mmap]]:
    """A file that is mapped as weights are."""
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(MIB))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        yield path, mapping


def test_zeros_that_stand_in_for_a_files_pages_end_with_the_step(
    mapped: tuple[Path, mmap.mmap],
) -> None:
    path, mapping = mapped
    content = mapping[:]
    for cut in (5 * mmap.PAGESIZE, 0):
        streaming.start(mapping, (str(path),), PLAN)
        assert streaming.active is not None
        os.truncate(path, cut)
        assert not any(mapping[cut:])
        path.write_bytes(content)
        with pytest.raises(DecodeError):
            streaming.active.check()
        assert mapping[:] == content
        streaming.stop(mapping)


@pytest.mark.needs("sanitizers")
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_no_weight_changes_while_a_thread_reads_it(tmp_path: Path, sanitizer: str) -> None:
    site = Path(llama_cpp.__file__).parents[1]
    sources = (ROOT / "tests/runtime/stress_streaming.cpp", ROOT / "native/streaming.cpp")
    headers = (f"-I{site / 'include'}", f"-I{ROOT / 'native'}")
    libraries = (f"-L{site / 'llama_cpp/lib'}", "-l:libggml-base.so.0", "-pthread")
    program = tmp_path / "stress"
    options = ("-std=c++20", "-O1", f"-fsanitize={sanitizer}", *headers)
    run("g++", *options, *sources, *libraries, "-o", program)
    libraries_here = {**os.environ, "LD_LIBRARY_PATH": str(site / "llama_cpp/lib")}
    # bytes of slots, bytes of weights that are streamed, number of experts
    for plan in ("100000 0 8", "1500000 0 8", "2500000 20000000 0"):
        run(program, tmp_path / "weights", *plan.split(), 10, 1, env=libraries_here)


@contextlib.contextmanager
def limit_threads(room_bytes: int) -> Iterator[None]:
    """Have threads take a stack of 1 GiB each, of so much address space."""
    libc, stack = ctypes.CDLL(None), ctypes.c_size_t()
    attributes, size = ctypes.create_string_buffer(64), ctypes.c_size_t(1 << 30)
    libc.pthread_getattr_default_np(attributes)
    libc.pthread_attr_getstacksize(attributes, ctypes.byref(stack))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    try:
        libc.pthread_attr_setstacksize(attributes, size)
        libc.pthread_setattr_default_np(attributes)
        resource.setrlimit(resource.RLIMIT_AS, (used + room_bytes, limits[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        libc.pthread_attr_setstacksize(attributes, stack)
        libc.pthread_setattr_default_np(attributes)


@pytest.mark.parametrize("n_threads", [0, 2])
def test_a_limit_on_threads_leaves_fewer_readers_or_page_faults(
    mapped: tuple[Path, mmap.mmap], caplog: pytest.LogCaptureFixture, n_threads: int
) -> None:
    before = len(os.listdir("/proc/self/task"))
    with limit_threads((n_threads << 30) + (1 << 29)):
        streaming.start(mapped, (str(mapped[0]),), PLAN)
    if streaming.active is None:
        assert n_threads == 0
        assert "cannot be streamed (Resource temporarily" in caplog.text
    else:
        assert len(os.listdir("/proc/self/task")) == before + n_threads
        streaming.stop(mapped)


def test_a_page_that_no_zeros_can_replace_ends_the_process(mapped: tuple[Path, mmap.mmap]) -> None:
    """Not in a fault without end: the process has all the mappings that it may have."""
    source = f"""
import ctypes, mmap, os
from edgeinfer.runtime.llama import streaming
from edgeinfer.runtime.memory_plan import StreamingPlan
path, libc, page = {str(mapped[0])!r}, ctypes.CDLL(None), mmap.PAGESIZE
with open(path, "rb") as file:
    mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
streaming.start(mapping, (path,), StreamingPlan(0, {8 * MIB}, {STREAMED_BYTES}))
assert streaming.active
os.truncate(path, 0)
most = int(open("/proc/sys/vm/max_map_count").read())
many = mmap.mmap(-1, (most + 9) * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
base = ctypes.addressof(ctypes.c_char.from_buffer(many))
for at in range(0, most + 9, 2):
    if libc.mprotect(ctypes.c_void_p(base + at * page), ctypes.c_size_t(page), 0):
        break
print(mapping[5 * page])
"""
    ended = subprocess.run([sys.executable, "-c", source], timeout=100)
    assert ended.returncode == -signal.SIGBUS


def own_memory() -> int:
    """Bytes of this process's memory that are in no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def numbers_of(path: Path) -> list[int]:
    """The descriptors of this process that are open on a file."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == str(path):
                found.append(int(name))
    return found


def test_a_parked_engine_holds_neither_files_nor_threads_nor_memory_for_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(model)
    with streamed(model, None) as engine:
        expected = answer(engine, ask()).text
    with closing(load(model)) as engine:
        engine._loaded.plan = replace(engine._loaded.plan, from_disk=True, streaming=plan)
        answer(engine, ask())
        engine.park()
        threads, files = len(os.listdir("/proc/self/task")), numbers_of(model)
        memory = own_memory()
        monkeypatch.setattr("edgeinfer.runtime.engine.make_plan", lambda *_: engine._loaded.plan)
        engine.resume()
        engine.resume(2)
        assert answer(engine, ask()).text == expected
        assert streaming.statistics().streamed_bytes_total > 0
        engine.park()
        assert streaming.statistics().streamed_bytes_total == 0
        # a thread that has ended is listed for a moment
        wait_until(lambda: len(os.listdir("/proc/self/task")) <= threads, "the readers' end")
        assert numbers_of(model) == files
        assert own_memory() < memory + 4 * MIB


def evict(path: Path) -> None:
    """Take a mapped file out of memory, as the kernel does for another program."""
    libc = ctypes.CDLL(None)
    with path.open("rb") as file:
        os.fsync(file.fileno())  # pages that are not written yet stay
    for area in [area for area in areas() if area.path == str(path)]:
        libc.madvise(ctypes.c_void_p(area.low), ctypes.c_size_t(area.high - area.low), MADV_PAGEOUT)


def test_weights_that_other_programs_push_out_again_and_again_are_streamed(model: Path) -> None:
    plan = plan_for(model)
    with streamed(model, plan) as engine:
        expected = answer(engine, ask()).text
        pinned_bytes = streaming.statistics().pinned_bytes
        for _ in range(8):  # a step notices pages that are lost since the faults of the one before it
            engine.between_steps(lambda: evict(model))
            answer(engine, ask(max_tokens=1))
        assert answer(engine, ask()).text == expected
        if not is_mixture(model):  # of a mixture, only experts are streamed
            assert streaming.statistics().moved_weights_total > 0
            assert streaming.statistics().pinned_bytes < pinned_bytes


def follow(stream: streaming.Streaming, available_bytes: int) -> None:
    stream.kernels.edgeinfer_stream_follow(ctypes.c_int64(available_bytes))


def test_less_free_memory_takes_weights_out_of_it_and_more_brings_them_back(model: Path) -> None:
    plan = plan_for(model)
    with streamed(model, plan) as engine:
        expected = answer(engine, ask()).text
        full = streaming.statistics()
        active = streaming.active
        assert active is not None
        least_free = 48 * MIB
        engine.between_steps(lambda: follow(active, full.pinned_bytes + least_free - 20 * MIB))
        assert answer(engine, ask()).text == expected
        less = streaming.statistics()
        if is_mixture(model):
            assert less.expert_slot_bytes <= plan.slot_bytes - 20 * MIB
        else:
            assert less.pinned_bytes < full.pinned_bytes - 18 * MIB
            assert less.moved_weights_total > 0
        engine.between_steps(lambda: follow(active, 1 << 40))
        assert answer(engine, ask()).text == expected
        again = streaming.statistics()
        if is_mixture(model):
            assert again.expert_slot_bytes > less.expert_slot_bytes
        else:
            assert again.streamed_bytes == 0
