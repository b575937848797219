"""Pictures in prompts: two real text models with random projectors, one with causal tiles and one whose
rows attend to each other in both directions.
"""

import contextlib
import ctypes
import io
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from made_decoders import make_lfm2, make_qwen2vl, make_qwen35
from made_projectors import IDEFICS3_TOKENS, copy_model, make_projector
from msgspec.structs import replace

from edgeinfer.errors import InvalidRequestError
from edgeinfer.media.pictures import PICTURE_MARK, Picture, decode, join_parts
from edgeinfer.platform.machine import read_machine
from edgeinfer.runtime import vision
from edgeinfer.runtime.chat_format.chat_format import PictureMarkers
from edgeinfer.runtime.engine import LlamaEngine, load_engine
from edgeinfer.runtime.event_stream import CollectedAnswer
from edgeinfer.runtime.events import TextDelta
from edgeinfer.runtime.kv_cache import common_prefix
from edgeinfer.runtime.llama.context import LlamaContext
from edgeinfer.runtime.llama.libllama import L
from edgeinfer.runtime.llama.model import _reserve_projector
from edgeinfer.runtime.llama.mtmd import Chunk, Projector
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.runtime.prefix_cache import block_saver, cache
from edgeinfer.runtime.prefix_cache.block_folder import BlockStore
from edgeinfer.runtime.prefix_cache.kv_block import read_header
from edgeinfer.runtime.prefix_cache.retention import forget_conversations
from edgeinfer.runtime.prompt_tokens import PromptTokens, row_tokens, text_only
from edgeinfer.runtime.requests import GenerateRequest, Message
from edgeinfer.runtime.vision import PromptPictures, Source, Span, Vision

from .conftest import GREEDY, answer, ask

Image = pytest.importorskip("PIL.Image")

#: Models of random weights, and the kinds of their projectors.
RANDOM = {
    "m-rope": (make_qwen2vl, "qwen2vl_merger"),
    "hybrid": (make_lfm2, "lfm2"),
    "hybrid m-rope": (make_qwen35, "qwen2vl_merger"),
}
WORDS = "The quick brown fox jumps over the lazy dog. " * 4


def png(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=1)
    return out.getvalue()


def picture(*, flip: int = 0, width: int = 300, height: int = 200) -> bytes:
    """The file of a pattern; `flip` changes the lowest bit of one pixel."""
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([x * 255 / width, y * 255 / height, ((x // 20 + y // 20) % 2 * 255)], -1)
    pixels = pixels.astype(np.uint8)
    pixels[0, 0, 0] ^= flip
    return png(pixels)


def chat(*parts: str | bytes, **fields: object) -> GenerateRequest:
    """Eight greedy tokens after one message, with their scores."""
    content, pictures = join_parts(parts)
    request_fields: dict[str, object] = {
        "messages": (Message(role="user", content=content, pictures=pictures),),
        "sampling": GREEDY,
        "max_tokens": 8,
        "ignore_eos": True,
        "logprobs": 3,
        **fields,
    }
    return GenerateRequest(**request_fields)  # type: ignore[arg-type]


def usage(reply: CollectedAnswer) -> tuple[int, int]:
    """The tokens of the prompt, and those of them that were cached."""
    assert reply.finish is not None
    return reply.finish.usage.prompt_tokens, reply.finish.usage.cached_tokens


pytestmark = pytest.mark.needs("encoder")


@pytest.fixture(scope="module", params=["tiles", "whole", *RANDOM])
def files(
    request: pytest.FixtureRequest,
    smollm2: Path,
    gemma3: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> ModelFiles:
    folder = tmp_path_factory.mktemp("pictures")
    if request.param == "tiles":
        text = copy_model(folder / "smol-vl.gguf", smollm2, IDEFICS3_TOKENS)
        projector = make_projector(folder / "mmproj.gguf", "idefics3", 576, patch=32, longest=512)
    elif request.param in RANDOM:
        make, kind = RANDOM[request.param]
        text = make(folder / "text.gguf", smollm2)
        projector = make_projector(folder / "mmproj.gguf", kind, 64)
    else:
        text = gemma3
        projector = make_projector(folder / "mmproj.gguf", "gemma3", 640)
    return ModelFiles(name=request.param, paths=(str(text),), projector=str(projector))


@pytest.fixture(scope="module")
def loaded_engine(files: ModelFiles) -> Iterator[LlamaEngine]:
    with closing(load_engine(files, LoadOptions(n_ctx=2048, n_parallel=8))) as engine:
        yield engine


@pytest.fixture
def engine(loaded_engine: LlamaEngine) -> LlamaEngine:
    """An engine whose cells are free: a prompt in cells out of order rounds otherwise, of text too."""
    loaded_engine.between_steps(loaded_engine._core.kv.drop_idle)
    return loaded_engine


def spans_of(engine: LlamaEngine, request: GenerateRequest) -> tuple[list[int], list[Span]]:
    spans: list[Span] = []
    prompt = engine._chat_format.render(request)
    return engine._input_processor.tokenize_chat(request, prompt, spans), spans


def scores(engine: LlamaEngine, tokens: list[int], spans: list[Span]) -> np.ndarray:
    """The logits behind a prompt with pictures, by calls of llama.cpp without our scheduler."""
    vision, loaded = engine._vision, engine._loaded
    assert vision is not None
    params = L.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 1024
    params.swa_full = params.kv_unified = True
    context = L.llama_init_from_model(loaded.model, params)
    starts = {span.start: span for span in spans}
    position = 0
    n_past, rows = 0, {span.digest: vision.encode(span).result() for span in spans}
    while n_past < len(tokens):
        span = starts.get(n_past)
        stop = span.end if span else min([s for s in starts if s > n_past], default=len(tokens))
        n = stop - n_past
        batch = L.llama_batch_init(n, loaded.n_embd if span else 0, 1)
        positions = np.arange(position, position + n, dtype=np.int32)
        position += span.chunk.n_positions if span else n
        if span and span.chunk.positions is not None:
            behind = np.array([[1], [1], [1], [0]]) * positions[0]
            positions = np.ascontiguousarray(span.chunk.positions + behind, np.int32)
            batch.pos = positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        batch.n_tokens = n
        if span:
            data = rows[span.digest][span.number]
            ctypes.memmove(batch.embd, data.ctypes.data, data.nbytes)
        for i in range(n):
            if not span:
                batch.token[i] = tokens[n_past + i]
            if positions.ndim == 1:
                batch.pos[i] = positions[i]
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = i == n - 1
        L.llama_set_causal_attn(context, not (span and span.chunk.is_whole))
        assert L.llama_decode(context, batch) == 0
        L.llama_set_causal_attn(context, True)
        n_past = stop
    n_vocab = loaded.vocab.n_vocab
    next_logits = np.ctypeslib.as_array(L.llama_get_logits_ith(context, -1), (n_vocab,)).copy()
    L.llama_free(context)
    return next_logits


def answer_as_bare_calls(engine: LlamaEngine, request: GenerateRequest) -> CollectedAnswer:
    logits = scores(engine, *spans_of(engine, request))
    expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    reply = answer(engine, request)
    top = [token.logprob for token in reply.logprobs[0].top]
    np.testing.assert_allclose(top, expected[np.argsort(expected)[::-1][:3]], atol=2e-3)
    return reply


def test_answer_is_that_of_bare_calls(engine: LlamaEngine) -> None:
    answer_as_bare_calls(engine, chat(WORDS, picture(), "What is in it?", cache_prompt=False))


def test_picture_is_prefilled_once(engine: LlamaEngine) -> None:
    first = answer(engine, chat(WORDS, picture(), "What is in it?"))
    again = answer(engine, chat(WORDS, picture(), "What is in it?"))
    fresh = answer(engine, chat(WORDS, picture(), "What is in it?", cache_prompt=False))
    n_prompt, n_cached = usage(again)
    if engine._loaded.supports_truncation:
        assert n_cached == n_prompt - 1
    else:
        assert n_cached == spans_of(engine, chat(WORDS, picture()))[1][-1].end
    assert usage(fresh)[1] == 0
    assert first.logprobs == again.logprobs == fresh.logprobs


def test_one_pixel_is_another_picture(engine: LlamaEngine) -> None:
    answer(engine, chat(WORDS, picture(), "What is in it?"))
    request = chat(WORDS, picture(flip=1), "What is in it?")
    other = answer(engine, request)
    assert usage(other)[1] == spans_of(engine, request)[1][0].start
    fresh = answer(engine, replace(request, cache_prompt=False))
    assert other.logprobs == fresh.logprobs


def test_rows_are_encoded_once(engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(engine, chat(picture(), "What is in it?"))
    vision = engine._vision
    assert vision is not None
    monkeypatch.setattr(vision._projector, "encode", lambda picture: pytest.fail("encoded again"))
    behind = answer(engine, chat("Another beginning. ", picture(), "What is in it?"))
    assert behind.finish is not None


def test_parked_engine_keeps_no_picture(engine: LlamaEngine) -> None:
    first = answer(engine, chat(picture(), "What is in it?"))
    engine.park()
    vision, batch = engine._vision, engine._core.executor.batch
    assert vision is not None
    assert not any((vision._encodings, vision._chunks_by_digest, vision._thread))
    assert batch._pictures is None
    engine.resume()
    assert answer(engine, chat(picture(), "What is in it?")).logprobs == first.logprobs


def test_several_pictures_keep_their_order(engine: LlamaEngine) -> None:
    a, b = picture(), picture(width=200, height=300)
    first = answer(engine, chat("First ", a, " then ", b, ".", cache_prompt=False))
    other = answer(engine, chat("First ", b, " then ", a, ".", cache_prompt=False))
    again = answer(engine, chat("First ", a, " then ", b, "."))
    assert first.logprobs == again.logprobs
    assert first.logprobs != other.logprobs


def test_eight_streams_beside_an_encoding_picture_keep_their_bits(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [
        ask("The towns, " * (1 + i), logprobs=3, cache_prompt=False, max_tokens=12) for i in range(8)
    ]
    seen = [chat(picture(width=width), "Which?", cache_prompt=False) for width in (310, 500)]
    with closing(load_engine(files, LoadOptions(n_ctx=4096, n_parallel=10))) as engine:
        alone = [answer(engine, request) for request in [*texts, *seen]]
        assert engine._vision is not None
        engine._vision.park()  # encode it again
        encode, n_written = engine._vision._projector.encode, 0

        def slow(pixels: Picture) -> list[np.ndarray]:
            rows = encode(pixels)
            while n_written < 16:
                rows = encode(pixels)
            return rows

        monkeypatch.setattr(engine._vision._projector, "encode", slow)
        pictured = [engine.submit(request) for request in seen]
        streams = [*map(engine.submit, texts), *pictured]
        beside = [CollectedAnswer() for _ in streams]
        for stream, into in zip(streams, beside, strict=True):
            for event in stream:
                into.add(event)
                n_written += isinstance(event, TextDelta)
    if not engine._loaded.supports_truncation:  # states round otherwise in a batch, of text too
        assert [reply.text for reply in beside] == [reply.text for reply in alone]
        return
    assert [reply.logprobs for reply in beside] == [reply.logprobs for reply in alone]


@pytest.mark.parametrize(("before", "question"), [("?", "What is in it?"), ("", "What is in the sky?")])
def test_prompt_cut_beside_a_picture_continues_exactly(
    engine: LlamaEngine, before: str, question: str
) -> None:
    answer(engine, chat(WORDS, picture(), "What is in it?"))
    cut = chat(WORDS[:-20] + before if before else WORDS, picture(), question)
    start = spans_of(engine, cut)[1][0].start
    cached = answer(engine, cut)
    fresh = answer(engine, replace(cut, cache_prompt=False))
    if before and not engine._loaded.supports_truncation:  # no checkpoint lies in the text before
        assert usage(cached)[1] == 0
    else:
        assert (0 < usage(cached)[1] < start) if before else (usage(cached)[1] > start)
    assert cached.logprobs == fresh.logprobs


def test_rows_are_the_same_by_any_number_of_threads(files: ModelFiles, engine: LlamaEngine) -> None:
    pixels = decode(picture())
    one_thread, two_threads = (Projector(files.projector, engine._loaded.model, n) for n in (1, 2))
    for rows, other_rows in zip(one_thread.encode(pixels), two_threads.encode(pixels), strict=True):
        assert rows.dtype == np.float32
        assert np.array_equal(rows, other_rows)
    one_thread.free()
    two_threads.free()


def test_picture_longer_than_the_window_continues_exactly(gemma3: Path, tmp_path: Path) -> None:
    projector = make_projector(tmp_path / "mmproj.gguf", "gemma3", 640, image=384, merge=1)
    files = ModelFiles(name="m", paths=(str(gemma3),), projector=str(projector))
    first, second = (chat(WORDS, picture(), question) for question in ("What?", "Where is it?"))
    options = LoadOptions(n_ctx=2048, n_parallel=2, n_batch=1024)
    with closing(load_engine(files, options)) as engine:
        spans = spans_of(engine, second)[1]
        assert spans[0].chunk.n_rows == 576  # the window is 512
        fresh = answer_as_bare_calls(engine, replace(second, cache_prompt=False))
        answer(engine, first)
        cached = answer(engine, second)
        assert usage(cached)[1] >= spans[0].end
        assert cached.logprobs == fresh.logprobs


@pytest.mark.parametrize(("n_before", "width"), [(1, 300), (2, 900), (5, 900), (6, 300)])
def test_picture_is_restored_from_disk(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_before: int, width: int
) -> None:
    """A block's 256 tokens end before it, inside it, and behind it."""
    monkeypatch.setattr(block_saver, "_MIN_PREFILL_S", 0.0)
    monkeypatch.setattr(cache, "_LONG_BLOCK_TOKENS", 256)
    asked, other = (
        chat(WORDS * n_before, picture(width=width), WORDS, picture(flip=1), WORDS, question)
        for question in ("What is in it?", "Where was it taken?")
    )
    with restart(files, tmp_path) as engine:
        first = answer(engine, asked)
        assert engine.flush_blocks()
        copy = shutil.copytree(tmp_path, tmp_path / "killed")
        fresh = answer(engine, replace(other, cache_prompt=False))
        spans = spans_of(engine, other)[1]
    with restart(files, copy, encodes=False) as engine:
        restored = answer(engine, other)
        assert restored.finish is not None
        assert restored.finish.usage.cached_disk_tokens >= spans[-1].end
        assert restored.logprobs == fresh.logprobs
        assert answer(engine, asked).logprobs == first.logprobs


@contextlib.contextmanager
def restart(files: ModelFiles, root: Path, *, encodes: bool = True) -> Iterator[LlamaEngine]:
    """An engine with a prefix cache, which may be told to neither decode nor encode a picture."""
    with pytest.MonkeyPatch.context() as patch:
        options = LoadOptions(n_ctx=2048, n_parallel=2)
        with closing(load_engine(files, options)) as engine:
            engine.open_prefix_cache(BlockStore(root))
            assert engine._vision is not None
            if not encodes:
                patch.setattr(vision, "decode", lambda file: pytest.fail("decoded again"))
                patch.setattr(
                    engine._vision._projector, "encode", lambda picture: pytest.fail("encoded again")
                )
            yield engine


def rows_on_disk(root: Path) -> list[Path]:
    headers = {path: read_header(path.read_bytes()[: 1 << 16]) for path in root.rglob("*.block")}
    return [path for path, header in headers.items() if header.kind == "rows"]


def test_known_picture_is_not_encoded_behind_another_prompt_after_a_restart(
    files: ModelFiles, tmp_path: Path
) -> None:
    """Its rows are stored at once: they outlive a process that is killed behind the first answer."""
    asked = chat("Another beginning. ", picture(), "What is in it?")
    root = tmp_path / "blocks"
    with restart(files, root) as engine:
        fresh = answer(engine, asked)
        answer(engine, chat(picture(flip=1), cache_prompt=False))
        answer(engine, chat(picture(flip=1), cache_on_disk=False))
        assert engine._prefix_cache is not None
        assert engine._prefix_cache.folder.flush(60)
        (path,) = rows_on_disk(root)
        copy = shutil.copytree(root, tmp_path / "killed")
    with restart(files, copy, encodes=False) as engine:
        assert answer(engine, asked).logprobs == fresh.logprobs
        first_reply = answer(engine, chat(WORDS, picture(), "What is in it?"))
        for other in (picture(flip=1), picture()):
            with pytest.raises(pytest.fail.Exception, match="decoded again"):
                engine.submit(chat(other, cache_salt="another"))
            with pytest.raises(pytest.fail.Exception, match="decoded again"):
                engine.submit(chat(picture(flip=1)))
    path = copy / path.relative_to(root)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with restart(files, copy) as engine:
        reply = answer(engine, chat(WORDS, picture(), "What is in it?"))
        assert reply.logprobs == first_reply.logprobs
        assert engine.metrics().blocks_damaged_total == 1


def test_rows_are_forgotten_with_their_conversations(files: ModelFiles, tmp_path: Path) -> None:
    with restart(files, tmp_path) as engine:
        for owner in ("a", "b"):
            answer(engine, chat(picture(), f"Question {owner}", conversation=owner))
        assert engine.flush_blocks()
        (path,) = rows_on_disk(tmp_path)
        forget_conversations(tmp_path, "a")
        assert path.exists()
        assert forget_conversations(tmp_path, "b") > 0
        assert not rows_on_disk(tmp_path)


def test_aborted_step_of_a_picture_is_computed_again(
    engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not engine._loaded.supports_truncation:
        return  # such a model's steps are not aborted
    request = chat(WORDS, picture(width=700, height=600), "What is in it?")
    fresh = answer(engine, replace(request, cache_prompt=False))
    batch = engine._core.executor.batch
    decode, n_steps = batch.decode, 0

    def abort(context: LlamaContext) -> int:
        nonlocal n_steps
        code = decode(context)
        n_steps += batch._pictures is not None
        return 2 if batch._pictures is not None and n_steps in (1, 3) else code

    monkeypatch.setattr(batch, "decode", abort)
    assert answer(engine, request).logprobs == fresh.logprobs
    assert n_steps >= 2


def test_cancelled_picture_leaves_the_engine_whole(engine: LlamaEngine) -> None:
    stream = engine.submit(chat(picture(width=290), "What is in it?"))
    stream.cancel()
    list(stream)
    cached = answer(engine, chat(picture(width=290), "What is in it?"))
    fresh = answer(engine, chat(picture(width=290), "What is in it?", cache_prompt=False))
    assert cached.logprobs == fresh.logprobs


def test_text_cannot_place_a_picture(engine: LlamaEngine) -> None:
    hostile = f"<__media__> <image> <start_of_image> {PICTURE_MARK} picture0n0e"
    assert min(engine.tokenize_chat(chat(hostile))) >= 0
    tokens = engine.tokenize_chat(chat(hostile, picture(), "What?"))
    n_rows = sum(span.chunk.n_rows for span in spans_of(engine, chat(picture()))[1])
    assert len(tokens) - len(text_only(tokens)) == n_rows


def test_refused_beside_pictures(engine: LlamaEngine) -> None:
    with pytest.raises(InvalidRequestError, match="overflow"):
        engine.submit(chat(picture(), overflow="shift"))
    with pytest.raises(InvalidRequestError, match="prompt_logprobs"):
        engine.submit(chat(picture(), prompt_logprobs=1))
    broken = Message(role="user", content="no place", pictures=(picture(),))
    with pytest.raises(InvalidRequestError, match="pictures: 1, placeholders: 0"):
        engine.submit(GenerateRequest(messages=(broken,)))
    with pytest.raises(InvalidRequestError, match="at most 64 pictures"):
        engine.submit(chat(*[picture()] * 65))
    with pytest.raises(InvalidRequestError, match="the picture cannot be read"):
        engine.submit(chat(picture()[:100]))


@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 200), (200, 1)])
def test_odd_picture_is_answered_or_refused(engine: LlamaEngine, width: int, height: int) -> None:
    odd = chat(png(np.zeros((height, width, 3), np.uint8)), "What is in it?")
    with contextlib.suppress(InvalidRequestError):  # some projectors take no line of pixels
        assert answer(engine, odd).finish is not None
    assert answer(engine, chat("Hello")).finish is not None


def test_failed_encoder_fails_its_request_alone(
    engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    vision = engine._vision
    assert vision is not None
    library = vision._projector._library

    class Failing:
        def __getattr__(self, name: str) -> object:
            return (lambda *_: 1) if name == "mtmd_encode_chunk" else getattr(library, name)

    with monkeypatch.context() as patch:
        patch.setattr(vision._projector, "_library", Failing())
        text = engine.submit(ask())
        with pytest.raises(Exception, match="could not encode"):
            list(engine.submit(chat(picture(width=333), "What is in it?")))
        assert list(text)
    assert answer(engine, chat(picture(width=333), "What is in it?")).finish is not None


def test_model_without_projector_refuses(smol: LlamaEngine) -> None:
    assert not smol.info.can_see
    with pytest.raises(InvalidRequestError, match="does not accept pictures"):
        smol.submit(chat(b"a file that nobody decodes", "What is in it?"))


def test_projector_of_another_model_is_refused(smollm2: Path, tmp_path: Path) -> None:
    foreign = make_projector(tmp_path / "mmproj.gguf", "idefics3", 576, patch=32, longest=512)
    narrow = make_projector(tmp_path / "narrow.gguf", "gemma3", 64)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(foreign.read_bytes()[:5000])
    for projector, message in ((foreign, "another model"), (narrow, "load"), (broken, "load")):
        files = ModelFiles(name="m", paths=(str(smollm2),), projector=str(projector))
        with closing(load_engine(files, LoadOptions(n_ctx=512, n_parallel=1))) as engine:
            assert not engine.info.can_see
            with pytest.raises(InvalidRequestError, match=rf"was refused: .*{message}"):
                engine.submit(chat(picture()))
            assert answer(engine, ask()).finish is not None


def test_batch_that_no_picture_fits_is_named(gemma3: Path, tmp_path: Path) -> None:
    projector = make_projector(tmp_path / "mmproj.gguf", "gemma3", 640)
    files = ModelFiles(name="m", paths=(str(gemma3),), projector=str(projector))
    with (
        closing(load_engine(files, LoadOptions(n_ctx=512, n_parallel=1, n_batch=32))) as engine,
        pytest.raises(InvalidRequestError, match=r"64 embedding rows.*batch holds 32"),
    ):
        engine.submit(chat(picture(), "What is in it?"))


def test_memory_plan_leaves_room_for_the_projector(tmp_path: Path) -> None:
    projector = tmp_path / "mmproj.gguf"
    projector.write_bytes(bytes(5000))
    machine = read_machine()
    files = ModelFiles(name="m", paths=(), projector=str(projector))
    remaining_bytes = _reserve_projector(machine, files).memory.available_bytes
    assert machine.memory.available_bytes - remaining_bytes == 5000


def test_picture_that_none_waits_for_is_not_encoded() -> None:
    """A client that sends large pictures and leaves takes no time of others' encoding."""
    started, go_on = threading.Event(), threading.Event()
    encoded: list[Picture] = []

    class Slow:
        def encode(self, picture: Picture) -> list[np.ndarray]:
            started.set()
            go_on.wait()
            encoded.append(picture)
            return [np.zeros((1, 4), np.float32)]

    vision = Vision(Slow(), "key", max_rows=1)  # type: ignore[arg-type]
    a, b, c = (Picture(1, 1, bytes(3 * [i])) for i in range(3))
    for pixels in (a, b, c):
        vision._keep_pixels(pixels.rgb, pixels)
    requests = [
        PromptPictures(vision, [Span(0, Source(pixels.rgb, b"", (1, 1)), 0, Chunk(n_rows=1))])
        for pixels in (a, b, c, c)
    ]
    for request in requests:
        request.encode_after(0)
    assert started.wait(60)
    for request in requests[:3]:  # the first is encoding, and another request waits for the third
        request.close()
    go_on.set()
    requests[3].wait(requests[3].spans[0], 60)
    assert requests[3].rows(requests[3].spans[0]).shape == (1, 4)
    assert encoded == [a, c]
    vision.park()


def test_tokens_of_a_tile_that_the_model_lacks_are_refused() -> None:
    class Tiles:
        def chunks(self, width: int, height: int) -> list[Chunk]:
            return [Chunk(n_rows=1), *[Chunk(tokens=(5, -1))] * (width > 100)]

    vision = Vision(Tiles(), "key", max_rows=1)  # type: ignore[arg-type]
    vision.append([], [], picture(width=100), chat(""))
    with pytest.raises(InvalidRequestError, match="belongs to another model"):
        vision.append([], [], picture(width=101), chat(""))


def test_row_tokens_name_pictures_and_their_starts() -> None:
    a, b = row_tokens(b"a", 500), row_tokens(b"b", 500)
    assert all(-(1 << 31) <= token < 0 for token in a + b)
    assert common_prefix(a, b) == 0
    in_place = row_tokens(b"c", 6, 3)
    tokens = PromptTokens([1, 2, *a, *b, *in_place, 3])
    assert [n for n in range(len(tokens) + 1) if tokens.round_down(n) == n] == [
        *(0, 1, 2, 502, 1002, 1008, 1009)
    ]
    assert tokens.round_down(501) == 2
    assert tokens.round_down(1001) == 502
    assert [tokens.block_end(n) for n in (1, 501, 1002, 1003, 1007, 1008)] == [
        *(1, 501, 1002, 1008, 1008, 1008)
    ]
    assert [tokens.position(n) for n in (2, 1002, 1004, 1008, 1009)] == [2, 1002, 1002, 1005, 1006]
    tokens.truncate(1002)
    tokens.extend([7] * 9)
    assert tokens.position(1011) == 1011, "the dropped picture still takes positions"


def test_pictures_must_have_their_pixels() -> None:
    for width, height, size in ((1, 1, 2), (0, 5, 0), (2, 2, 13)):
        with pytest.raises(ValueError, match="cannot be a picture"):
            Picture(width, height, bytes(size))


def test_places_survive_a_template_that_moves_messages() -> None:
    markers = PictureMarkers()
    a, b = picture(), picture(flip=1)
    joined = (join_parts(["x", a]), join_parts([b, "y"]))
    first, second = (Message(role="user", content=text, pictures=files) for text, files in joined)
    later, earlier = markers.insert([first, second])
    assert list(markers.split(earlier.content + later.content, [a, b])) == ["", b, "yx", a, ""]
    spaced = f"User: {earlier.content}; User: {later.content}"
    assert list(markers.split(spaced, [a, b], is_tight=True)) == ["User:", b, "y; User: x", a, ""]
    for prompt in (later.content, later.content + earlier.content * 2):
        with pytest.raises(InvalidRequestError, match="pictures into the prompt"):
            list(markers.split(prompt, [a, b]))
