"""Every automatic choice, on machines that are only described."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from edgeinfer.errors import OutOfMemoryError
from edgeinfer.runtime.layer_plan import Device, LayerPlan, make_layer_plan
from edgeinfer.runtime.memory_plan import (
    MemoryPlan,
    choose_cells,
    choose_context,
    choose_parallel,
    choose_threads,
    disk_pace,
    disk_warning,
    make_exact_plan,
    make_plan,
    plan_streaming,
)
from edgeinfer.runtime.model_shape import Shape, make_buffers, make_shape, with_tensors
from edgeinfer.runtime.options import LoadOptions

from .conftest import machine

GIB = 1 << 30


def test_threads_follow_cores_quota_and_what_is_asked() -> None:
    assert choose_threads(0, machine(GIB, 8)).value == 8
    assert choose_threads(0, machine(GIB, 8, quota=2.5)).value == 2
    assert choose_threads(0, machine(GIB, 8, quota=0.5)).value == 1
    assert "control group" in choose_threads(0, machine(GIB, 8, quota=2.5)).reason
    assert choose_threads(3, machine(GIB, 8)).value == 3


@pytest.mark.parametrize(("threads", "expected"), [(1, 4), (2, 8), (4, 16), (32, 16)])
def test_sequences_follow_threads(threads: int, expected: int) -> None:
    assert choose_parallel(0, threads, 1024, 16 * GIB).value == expected


def test_sequences_fit_memory() -> None:
    chosen = choose_parallel(0, 4, 1 << 20, 8 * GIB)
    assert chosen.value == 4
    assert "MiB" in chosen.reason
    assert choose_parallel(11, 4, 1 << 20, 8 * GIB).value == 11


@pytest.mark.parametrize(
    ("n_ctx_train", "per_token", "free", "expected", "word"),
    [
        (8192, 23 << 10, 16 * GIB, 8192, "trained"),
        (131_072, 16 << 10, 64 * GIB, 131_072, "trained"),
        (1 << 20, 16 << 10, 64 * GIB, 131_072, "longest automatic"),
        (131_072, 128 << 10, 16 * GIB, 65_536, "half"),
        (131_072, 128 << 10, GIB, 4096, "half"),
        (131_072, 1 << 20, 64 * GIB, 32_768, "half"),
        (1000, 1 << 10, 64 * GIB, 1000, "trained"),
    ],
)
def test_context_has_a_value_and_its_reason(
    n_ctx_train: int, per_token: int, free: int, expected: int, word: str
) -> None:
    chosen = choose_context(0, n_ctx_train, per_token, free)
    assert chosen.value == expected
    assert word in chosen.reason


def test_context_that_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(OutOfMemoryError, match="131072 tokens needs 16384 MiB"):
        choose_context(131_072, 131_072, 128 << 10, 8 * GIB)
    with pytest.raises(OutOfMemoryError, match="too little memory"):
        choose_context(0, 8192, 128 << 10, 1 << 20)
    with pytest.raises(OutOfMemoryError):
        choose_context(0, 8192, 128 << 10, -GIB)


def test_cells_hold_one_context_or_all_sequences() -> None:
    assert choose_cells(8192, 8, 1024, 16 * GIB).value == 8192
    assert choose_cells(2048, 16, 1024, 16 * GIB).value == 16_384
    assert choose_cells(2048, 16, 1 << 18, GIB).value == 2048
    assert choose_cells(2048, 16, 1 << 17, 16 * GIB).value == 16_384
    assert choose_cells(2048, 16, 1 << 17, 2 * GIB).value == 8192
    assert choose_cells(1000, 1, 1 << 20, GIB).value == 1024


#: An 8B of 32 layers in four bits: 4.6 GiB of weights, 128 KiB of cache a token.
DENSE = Shape(
    weights_bytes=int(4.6 * GIB),
    weights_bytes_per_token=int(4.6 * GIB),
    file_type=15,
    n_ctx_train=8192,
    n_vocab=128_256,
    n_embd=4096,
    n_ff=14_336,
    n_query=4096,
    kv_rows=(65_536,),
    n_layer=32,
    embedding_bytes=int(0.3 * GIB),
)
#: 48 layers whose experts are nearly all of 17 GiB.
EXPERTS = replace(
    DENSE, weights_bytes=17 * GIB, expert_bytes=16 * GIB, n_layer=48, n_ff=6144, kv_rows=(49_152,)
)
#: 30 layers in 90 MB.
TINY = replace(
    DENSE,
    weights_bytes=90 << 20,
    embedding_bytes=28 << 20,
    n_layer=30,
    n_embd=576,
    n_ff=1536,
    n_query=576,
    n_vocab=49_152,
    kv_rows=(11_520,),
)
#: Half of it is the output.
LARGE_OUTPUT = replace(DENSE, embedding_bytes=int(2.3 * GIB))


def plan_of(shape: Shape) -> MemoryPlan:
    return make_plan(shape, LoadOptions(n_ctx=4096, n_parallel=4), machine(64 * GIB))


@pytest.mark.parametrize(("n_vocab", "n_outputs"), [(49_152, 256), (151_936, 110), (262_144, 64)])
def test_more_tokens_have_logits_where_these_take_little_memory(n_vocab: int, n_outputs: int) -> None:
    shape = replace(TINY, n_vocab=n_vocab)
    assert plan_of(shape).n_outputs == n_outputs
    assert n_outputs == 256 or shape.logits_bytes(n_outputs) <= 64 << 20


def test_more_tokens_have_logits_where_these_take_no_memory() -> None:
    plan = plan_of(DENSE)
    limits = {"n_seq_max": plan.n_seq_max, "n_ubatch": plan.n_batch, "n_outputs": 1}
    fewest = make_buffers(DENSE, plan.n_cells.value, plan.kv_type.value, **limits)
    assert (plan.n_outputs, plan.buffers.compute_bytes) == (204, fewest.compute_bytes)


def test_fewer_tokens_have_logits_where_memory_is_short() -> None:
    n_outputs, options = [], LoadOptions(n_ctx=4096, n_parallel=4, kv_type="f16")
    for available in range(4 * GIB, 10 * GIB, 32 << 20):
        plan = make_plan(DENSE, options, machine(available))
        n_outputs.append(plan.n_outputs)
        unused = available - plan.buffers.total_bytes if plan.fits else 0
        assert DENSE.logits_bytes(plan.n_outputs - 32) <= unused // 8
    assert n_outputs == sorted(n_outputs)
    assert (n_outputs[0], n_outputs[-1]) == (32, 204)


def test_streaming_leaves_room_for_logits() -> None:
    few, many = (
        make_plan(DENSE, LoadOptions(n_ctx=8192, n_parallel=n), machine(4 * GIB)) for n in (4, 8)
    )
    assert few.streaming is not None
    assert many.streaming is not None
    pinned = few.streaming.pinned_bytes - many.streaming.pinned_bytes
    compute = many.buffers.compute_bytes - few.buffers.compute_bytes
    grown = DENSE.logits_bytes((many.n_outputs - many.n_seq_max) - (few.n_outputs - few.n_seq_max))
    assert pinned == compute + grown > compute


def devices_with(*free_gib: float) -> tuple[Device, ...]:
    return tuple(
        Device(name=f"Vulkan{i}", description="", kind="gpu", backend="", free_bytes=int(g * GIB))
        for i, g in enumerate(free_gib)
    )


def spread(shape: Shape, *free_gib: float, n_layers: int | str = "auto") -> LayerPlan:
    return make_layer_plan(shape, plan_of(shape), devices_with(*free_gib), n_layers)


@pytest.mark.parametrize(
    ("shape", "free_gib", "n_layers", "n_without"),
    [
        (DENSE, (24.0,), 33, 0),
        (DENSE, (8.0,), 33, 0),
        (DENSE, (4.0,), 23, 0),
        (DENSE, (2.0,), 0, 0),
        (DENSE, (0.5,), 0, 0),
        (DENSE, (3.5, 3.5), 33, 0),
        (DENSE, (24.0, 0.1), 33, 0),
        (EXPERTS, (24.0,), 49, 0),
        (EXPERTS, (12.0,), 49, range(10, 40)),
        (EXPERTS, (4.0,), 49, range(35, 49)),
        (EXPERTS, (1.0,), 0, 0),
        (TINY, (1.0,), 31, 0),
        (TINY, (0.3,), 0, 0),
        (DENSE, (), 0, 0),
    ],
)
def test_auto_leaves_experts_first_then_layers_then_all(shape, free_gib, n_layers, n_without) -> None:
    layer_plan = spread(shape, *free_gib)
    assert layer_plan.n_layers == n_layers
    assert layer_plan.n_without_experts in (n_without if isinstance(n_without, range) else (n_without,))
    assert layer_plan.reason
    held = layer_plan.weights_bytes + layer_plan.kv_bytes + layer_plan.compute_bytes
    used = [device for device in devices_with(*free_gib) if device.name in layer_plan.devices]
    assert held <= sum(device.free_bytes for device in used)


def test_more_room_never_holds_less() -> None:
    counts = [spread(DENSE, gib / 4).n_layers for gib in range(1, 33)]
    assert counts == sorted(counts)
    assert {0, 33} < set(counts)
    assert min(filter(None, counts)) >= 17, "less than half was never measured to gain"
    assert "--gpu-layers N" in spread(DENSE, 2.0).reason


def test_another_device_never_makes_the_plan_worse() -> None:
    dice = random.Random(7)
    for _ in range(300):
        shape = dice.choice([DENSE, EXPERTS])
        first, second = dice.uniform(1, 30), dice.uniform(0.2, 6)
        one, two = spread(shape, first), spread(shape, first, second)
        assert (two.n_layers, -two.n_without_experts) >= (one.n_layers, -one.n_without_experts)


def test_layers_are_split_by_the_room_of_each_device() -> None:
    small, large = spread(DENSE, 6.0, 18.0).split
    assert (small < large / 2, small + large) == (True, 33)
    assert spread(DENSE, 1.0, 1.0, n_layers=8).split == (5, 3), "the output weighs two layers"
    assert spread(DENSE, 24.0, 0.1).devices == ("Vulkan0",)


@pytest.mark.parametrize("shape", [DENSE, EXPERTS, LARGE_OUTPUT])
@pytest.mark.parametrize("free_gib", [(4, 2.5), (2.5, 4), (3, 3), (5, 1, 4), (8, 7)])
def test_no_device_is_given_more_than_it_has(shape, free_gib) -> None:
    layer_plan = spread(shape, *free_gib)
    layer = (shape.weights_bytes - shape.embedding_bytes - shape.expert_bytes) // shape.n_layer
    layer += layer_plan.kv_bytes // (layer_plan.n_layers - 1)
    experts = shape.expert_bytes // shape.n_layer
    first = layer_plan.n_all - layer_plan.n_layers
    held = [layer + experts * (i >= layer_plan.n_without_experts) for i in range(first, shape.n_layer)]
    held.append(shape.embedding_bytes)
    for name, n in zip(layer_plan.devices, layer_plan.split, strict=True):
        free = free_gib[int(name.removeprefix("Vulkan"))] * GIB
        assert sum(held[:n]) + layer_plan.compute_bytes / len(layer_plan.devices) <= free
        held = held[n:]


def test_what_is_asked_is_taken_at_its_word() -> None:
    assert spread(DENSE, 1.0, n_layers="all").n_layers == 33
    assert spread(DENSE, 24.0, n_layers=7).n_layers == 7
    assert spread(DENSE, 24.0, n_layers=700).n_layers == 33
    assert spread(DENSE, 24.0, n_layers="none").devices == ()
    assert spread(DENSE, 24.0, n_layers=0).reason == "as asked"
    assert "no device" in spread(DENSE, n_layers="all").reason


def test_a_person_reads_it() -> None:
    assert str(spread(DENSE, 24.0)) == "33 of 33 on Vulkan0"
    assert "experts of" in str(spread(EXPERTS, 12.0))
    assert str(spread(DENSE, 0.5)).startswith("none: ")


#: Weights that a token uses: an eighth of the experts, and all else.
SPARSE = replace(EXPERTS, weights_bytes_per_token=3 * GIB)


def streaming_on(shape: Shape, available_bytes: int, **options: int) -> MemoryPlan:
    chosen = {"n_parallel": 1, "n_ctx": 1024, **options}
    return make_plan(shape, LoadOptions(**chosen), machine(available_bytes))  # type: ignore[arg-type]


@given(
    available=st.integers(1 << 20, 32 * GIB),
    unread=st.sampled_from([0, int(0.3 * GIB)]),
    tensor=st.integers(0, GIB),
)
def test_pinned_and_streamed_weights_are_all_that_a_dense_model_reads(
    available: int, unread: int, tensor: int
) -> None:
    shape = replace(DENSE, unread_bytes=unread, layer_tensor_bytes=tensor)
    plan = streaming_on(shape, available)
    streaming = plan.streaming
    assert plan.from_disk or streaming is None
    if streaming is None:
        return
    assert streaming.pinned_bytes + streaming.read_bytes == shape.weights_bytes - unread
    assert streaming.slot_bytes >= max(64 << 20, 2 * tensor + 4 * 65536)
    assert streaming.pinned_bytes >= shape.embedding_bytes
    used = streaming.pinned_bytes + streaming.slot_bytes + plan.buffers.kv_bytes // 4
    free = available - used - plan.buffers.compute_bytes - (64 << 20)
    assert free >= max(100_000_000, available // 20)
    if streaming.read_bytes:
        assert free <= max(100_000_000, available // 20)  # nothing is left that could be pinned


@given(available=st.integers(1 << 20, 32 * GIB))
def test_a_mixture_pins_all_but_experts_and_gives_them_the_other_memory(available: int) -> None:
    plan = streaming_on(SPARSE, available)
    streaming = plan.streaming
    assert plan.from_disk or streaming is None
    if streaming is None:
        return
    assert streaming.pinned_bytes == GIB
    assert 2 * GIB // 48 <= streaming.slot_bytes <= 16 * GIB
    used = GIB + streaming.slot_bytes + plan.buffers.kv_bytes // 4 + plan.buffers.compute_bytes
    assert available - used >= max(100_000_000, available // 20)


def test_weights_that_fit_are_not_streamed() -> None:
    assert streaming_on(DENSE, 6 * GIB).streaming is None
    assert streaming_on(SPARSE, 20 * GIB).streaming is None


def test_memory_below_one_layers_experts_is_left_to_page_faults() -> None:
    least = next(n for n in range(GIB, 4 * GIB, 1 << 20) if plan_streaming(SPARSE, n, 0))
    streaming = plan_streaming(SPARSE, least, 0)
    assert streaming is not None
    assert 2 * GIB // 48 <= streaming.slot_bytes < 2 * GIB // 48 + (1 << 20)
    assert plan_streaming(SPARSE, least - (1 << 20), 0) is None


def test_a_second_process_pins_what_the_first_has_left() -> None:
    first = streaming_on(DENSE, 4 * GIB).streaming
    assert first is not None
    slots_and_cache = first.slot_bytes + streaming_on(DENSE, 4 * GIB).buffers.kv_bytes
    second = streaming_on(DENSE, 4 * GIB - slots_and_cache).streaming
    assert second is not None
    assert first.pinned_bytes - second.pinned_bytes == pytest.approx(slots_and_cache, rel=0.06)


def test_an_automatic_context_of_streamed_weights_is_small() -> None:
    plan = streaming_on(DENSE, 4 * GIB, n_ctx=0)
    assert plan.streaming is not None
    assert plan.buffers.kv_bytes <= GIB // 2
    assert 2048 <= plan.n_ctx.value <= 8192


@given(first=st.integers(2 * GIB, 20 * GIB), second=st.integers(2 * GIB, 20 * GIB))
def test_more_memory_for_experts_never_reads_more(first: int, second: int) -> None:
    few, many = (plan_streaming(SPARSE, available, 0) for available in sorted((first, second)))
    assert few is not None
    assert many is not None
    assert SPARSE.used_expert_bytes == 2 * GIB > few.read_bytes >= many.read_bytes >= 0
    most = plan_streaming(SPARSE, 20 * GIB, 0)
    assert most is not None
    assert (most.slot_bytes, most.read_bytes) == (16 * GIB, 0)


def test_rate_is_that_of_the_disk_over_the_bytes_of_a_token() -> None:
    plan = streaming_on(DENSE, 4 * GIB)
    assert plan.streaming is not None
    assert disk_pace(DENSE, plan.streaming, 1e9) == 1e9 / plan.streaming.read_bytes
    assert disk_pace(DENSE, None, 1e9) == 1e9 / DENSE.weights_bytes
    text = disk_warning(DENSE, machine(4 * GIB), plan, 1e9)
    assert "stay in memory, the others are read from disk for each token" in text
    assert "at 1.0 GB/s (measured just now)" in text
    mixture = streaming_on(SPARSE, 8 * GIB)
    text = disk_warning(SPARSE, machine(8 * GIB), mixture, 1e9)
    assert "of the experts that a token uses are in memory)" in text


def test_tensors_say_which_weights_a_token_does_not_read() -> None:
    sizes = {"token_embd.weight": 300, "blk.0.ffn_up.weight": 500, "blk.0.attn_q.weight": 200}
    tied = with_tensors(DENSE, sizes)
    assert (tied.unread_bytes, tied.layer_tensor_bytes, tied.expert_bytes) == (0, 500, 0)
    untied = with_tensors(DENSE, {**sizes, "output.weight": 400})
    assert (untied.unread_bytes, untied.embedding_bytes) == (300, 400)
    assert untied.weights_bytes_per_token == DENSE.weights_bytes - 300
    experts = {f"blk.{i}.ffn_{name}_exps.weight": 5 * GIB for i, name in enumerate(("up", "down"))}
    mixture = with_tensors(SPARSE, {**sizes, **experts})
    assert (mixture.expert_bytes, mixture.layer_tensor_bytes) == (10 * GIB, 500)
    assert mixture.used_expert_bytes == pytest.approx(10 * GIB / 8, rel=1e-6)


def test_tensors_are_only_read_for_weights_that_do_not_fit() -> None:
    options = LoadOptions(n_ctx=1024, n_parallel=1)
    make_exact_plan(DENSE, options, machine(8 * GIB), lambda: pytest.fail("they fit"))
    sizes = {"token_embd.weight": GIB, "output.weight": GIB}
    shape, plan = make_exact_plan(DENSE, options, machine(4 * GIB), lambda: sizes)
    assert plan.streaming is not None
    assert shape.unread_bytes == GIB
    assert plan.streaming.pinned_bytes + plan.streaming.read_bytes == DENSE.weights_bytes - GIB


def eight_b(n_layer: int, n_ff: int, n_vocab: int, n_ctx_train: int) -> Shape:
    """The shape of an 8B in Q4_K_M, which has 4.85 bits a weight."""
    n_embd, n_kv = 4096, 1024
    layer = 2 * n_embd * n_embd + 2 * n_embd * n_kv + 3 * n_embd * n_ff
    n_params = n_layer * layer + 2 * n_vocab * n_embd
    sizes = {"n_vocab": n_vocab, "n_params": n_params, "weights_bytes": int(n_params * 0.60625)}
    metadata: dict[str, object] = {
        "general.architecture": "llama",
        "llama.block_count": n_layer,
        "llama.embedding_length": n_embd,
        "llama.feed_forward_length": n_ff,
        "llama.attention.head_count": 32,
        "llama.attention.head_count_kv": 8,
        "llama.context_length": n_ctx_train,
    }
    return make_shape(metadata, **sizes)


LLAMA_8B, QWEN_8B = eight_b(32, 14_336, 128_256, 131_072), eight_b(36, 12_288, 151_936, 40_960)


@pytest.mark.parametrize("shape", [LLAMA_8B, QWEN_8B])
def test_automatic_context_is_as_long_as_the_card_allows_with_all_layers(shape: Shape) -> None:
    plan = make_plan(shape, LoadOptions(), machine(26 * GIB))
    lengths = []
    for card_gib in (8, 10, 12, 16, 24):
        layer_plan = make_layer_plan(shape, plan, devices_with(card_gib - 0.6), "auto")
        assert layer_plan.n_layers == layer_plan.n_all == shape.n_layer + 1, card_gib
        lengths.append(layer_plan.n_cells)
        shorter = f"with a context of {layer_plan.n_cells:,} tokens; --ctx {plan.n_ctx.value} keeps"
        assert (shorter in layer_plan.reason) == (layer_plan.n_cells < plan.n_cells.value)
    assert lengths == sorted(lengths)
    assert 8192 <= lengths[0] < lengths[-1] == plan.n_cells.value


@pytest.mark.parametrize("shape", [LLAMA_8B, QWEN_8B])
def test_requested_context_is_never_shortened_for_a_card(shape: Shape) -> None:
    plan = make_plan(shape, LoadOptions(n_ctx=32_768), machine(26 * GIB))
    layer_plan = make_layer_plan(shape, plan, devices_with(7.4), "auto")
    assert layer_plan.n_cells in (0, plan.n_cells.value)
    assert layer_plan.n_layers < layer_plan.n_all


def test_card_too_small_for_all_layers_gets_as_many_as_fit_with_a_useful_context() -> None:
    plan = make_plan(QWEN_8B, LoadOptions(), machine(26 * GIB))
    layer_plan = make_layer_plan(QWEN_8B, plan, devices_with(5.4), "auto")
    assert layer_plan.n_all // 2 < layer_plan.n_layers < layer_plan.n_all
    assert layer_plan.n_cells >= 8192
    more = make_layer_plan(QWEN_8B, plan, devices_with(5.4), layer_plan.n_layers + 1)
    assert more.total_bytes > 5.4 * GIB - (256 << 20) - (100 << 20)


def test_copies_of_a_quantized_cache_are_planned() -> None:
    """CUDA's attention keeps f16 copies of one layer's K and V."""
    kinds = [LoadOptions(n_ctx=40_960, kv_type=kind, n_parallel=1) for kind in ("f16", "q8_0")]
    plans = [make_plan(QWEN_8B, options, machine(64 * GIB)) for options in kinds]
    placed = [make_layer_plan(QWEN_8B, plan, devices_with(24), "all") for plan in plans]
    assert placed[1].compute_bytes - placed[0].compute_bytes == 40_960 * (1024 + 1024) * 2


def test_draft_model_takes_its_part_of_the_plan() -> None:
    roomy = machine(24 * GIB)
    alone = make_plan(DENSE, LoadOptions(n_ctx=8192), roomy)
    both = make_plan(DENSE, LoadOptions(n_ctx=8192), roomy, TINY)
    more = make_plan(TINY, LoadOptions(n_ctx=8192), roomy).buffers
    assert both.has_draft
    assert both.buffers.weights_bytes == alone.buffers.weights_bytes + more.weights_bytes
    assert both.buffers.kv_bytes == pytest.approx(alone.buffers.kv_bytes + more.kv_bytes, rel=0.01)
    assert both.buffers.compute_bytes > alone.buffers.compute_bytes


def test_draft_model_of_the_catalogue_is_left_out_where_memory_is_short() -> None:
    large = replace(TINY, weights_bytes=4 * GIB)
    small_machine = machine(8 * GIB)
    plan = make_plan(DENSE, LoadOptions(), small_machine, large)
    assert plan == make_plan(DENSE, LoadOptions(), small_machine)
    assert plan.fits
    asked = make_plan(DENSE, LoadOptions(draft="large"), small_machine, large)
    assert asked.has_draft
    assert asked.from_disk
