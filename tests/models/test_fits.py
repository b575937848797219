"""Estimates of which models fit a machine, as `list --fits` and the first run show them."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from msgspec.structs import replace

from edgeinfer.chat.model_choices import list_choices
from edgeinfer.cli.main import main
from edgeinfer.models import fits
from edgeinfer.models.catalog import load_catalog
from edgeinfer.platform.machine import Memory, Rate, read_memory_rate
from edgeinfer.runtime.layer_plan import Device

GB = 10**9
CARD = Device(name="Vulkan0", description="RTX", kind="gpu", backend="vulkan")


@pytest.fixture
def machine(monkeypatch):
    """Return a function that pretends memory, bandwidth and GPU memory."""

    def make(
        available_bytes: int, bytes_per_s: float, threads: int, busy: bool = False, card_bytes: int = 0
    ) -> None:
        memory = Memory(total_bytes=available_bytes, available_bytes=available_bytes, reason="")
        rate = Rate(bytes_per_s, threads, busy)
        monkeypatch.setattr(fits, "read_memory", lambda: memory)
        monkeypatch.setattr(fits, "memory_rate", lambda: rate)
        card = replace(CARD, total_bytes=card_bytes)
        monkeypatch.setattr(fits, "cards", lambda: (card,) if card_bytes else ())

    return make


@pytest.fixture
def list_fits(as_json):
    return lambda *arguments: as_json("list", "--fits", *arguments)["models"]


def test_memory_rate_is_measured_on_this_machine() -> None:
    measured = read_memory_rate()
    assert measured.bytes_per_s > 1e8
    assert measured.threads >= 1


def test_memory_rate_is_the_fastest_measured_so_far(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path))
    measured = iter([Rate(3e9, 2, True), Rate(1e9, 2, True), Rate(5e9, 2, False)])
    monkeypatch.setattr(fits, "read_memory_rate", lambda: next(measured))
    rates = [fits.memory_rate.__wrapped__().bytes_per_s for _process in range(5)]
    assert rates == [3e9, 3e9, 5e9, 5e9, 5e9]


def test_disk_rate_is_the_fastest_until_the_machine_is_idle(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path))
    rates, loads = iter([0.0, 3e9, 1e9]), iter([False, True, False])  # 0.0: no file is large enough
    monkeypatch.setattr(fits, "read_rate", lambda *_: next(rates))
    monkeypatch.setattr(fits, "is_busy", lambda: next(loads))
    measured = [fits.disk_rate.__wrapped__() for _process in range(4)]
    assert [rate.bytes_per_s for rate in measured] == [0.0, 3e9, 3e9, 3e9]
    assert [rate.busy for rate in measured] == [False, True, False, False]


def test_disk_rate_leaves_out_files_that_cannot_be_found_or_opened(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path))
    stat, readable = Path.stat, tmp_path / "readable"
    readable.touch()

    def refuse(path: Path, **arguments: bool) -> os.stat_result:
        if path.name == "denied":
            raise PermissionError(errno.EACCES, "denied")
        return stat(path, **arguments)

    monkeypatch.setattr(Path, "stat", refuse)
    pulled = SimpleNamespace(paths=[tmp_path / "denied", tmp_path / "missing", readable])
    monkeypatch.setattr(fits, "list_pulled", lambda: [pulled])
    measured: list[Path] = []

    def measure(*paths: Path) -> float:
        measured.extend(paths)
        return 1e9

    monkeypatch.setattr(fits, "read_rate", measure)
    assert fits.disk_rate.__wrapped__().bytes_per_s == 1e9
    assert measured == [readable]


def test_busy_disk_counts_only_for_models_that_are_read_from_it(machine, capsys, monkeypatch) -> None:
    machine(12 * GB, 40e9, 2)
    monkeypatch.setattr(fits, "disk_rate", lambda: Rate(1e9, 8, busy=True))
    for name, is_read in (("qwen3-30b-a3b-instruct-2507", True), ("smollm2-135m-instruct", False)):
        assert main(["list", "--fits", name]) == 0
        assert ("the machine was busy" in capsys.readouterr().out) == is_read


def test_picker_shows_the_figures_of_list_whatever_memory_is_free(
    machine, list_fits, monkeypatch
) -> None:
    machine(12 * GB, 40e9, 2)
    by_name = {model["name"]: model["fit"] for model in list_fits()}
    memory = Memory(total_bytes=12 * GB, available_bytes=GB, reason="")
    monkeypatch.setattr(fits, "read_memory", lambda: memory)
    choices = {choice.name: choice.fit for choice in list_choices() if choice.fit is not None}
    assert len(choices) > 20
    for name, fit in choices.items():
        assert msgspec.to_builtins(replace(fit, shortage="")) == by_name[name]
    assert {bool(fit.shortage) for fit in choices.values() if fit.group == "slow"} == {True}
    assert {bool(fit.shortage) for fit in choices.values()} == {True, False}


def test_groups_are_headed_and_in_order_of_use(machine, capsys) -> None:
    machine(12 * GB, 40e9, 2, busy=True)
    assert main(["list", "--fits"]) == 0
    out = capsys.readouterr().out
    heads = [line.partition(":")[0] for line in out.split("\n\n") for line in [line.splitlines()[0]]]
    too_big = "too big for the memory of this machine"
    assert heads[1:-1] == ["comfortable", "slow", too_big, "embedding and reranking"]
    assert "the machine was busy" in out.splitlines()[-1]
    assert max(map(len, out.splitlines())) <= 120


def test_model_larger_than_memory_is_as_fast_as_the_disk_allows(
    machine, list_fits, monkeypatch
) -> None:
    machine(12 * GB, 40e9, 2)
    speeds = []
    for rate in (0.0, 0.5e9, 2e9):
        monkeypatch.setattr(fits, "disk_rate", lambda rate=rate: Rate(rate, 8, busy=False))
        large = [model for model in list_fits() if model["fit"]["group"] == "too big"]
        assert large
        assert all("from the disk" in model["fit"]["why"] for model in large)
        speeds.append({model["name"]: model["fit"]["tokens_per_s"] for model in large})
    assumed, slow, fast = speeds
    assert assumed == slow  # a disk that was not measured counts as one of 0.5 GB/s
    assert fast["qwen3-30b-a3b-instruct-2507"] > 2 * slow["qwen3-30b-a3b-instruct-2507"]
    memory = Memory(total_bytes=12 * GB, available_bytes=12 * GB, reason="")
    mixture = fits.fit(16 * GB, "chat", 0.1, Rate(40e9, 2, False), memory=memory)
    dense = fits.fit(16 * GB, "chat", 1.0, Rate(40e9, 2, False), memory=memory)
    assert mixture.tokens_per_s > 5 * dense.tokens_per_s > 0


def test_embedding_models_are_not_ranked_by_how_fast_they_write(machine, list_fits) -> None:
    machine(12 * GB, 40e9, 2)
    by_group: dict[str, list[str]] = {}
    for model in list_fits():
        by_group.setdefault(model["fit"]["group"], []).append(model["purpose"])
    assert set(by_group["embedding"]) == {"embedding", "reranker"}
    assert not {"embedding", "reranker"} & {*by_group["comfortable"], *by_group["slow"]}


def test_quantization_and_size_are_of_what_pull_stores(machine, list_fits) -> None:
    machine(16 * GB, 40e9, 2)
    by_name = {model["name"]: model for model in list_fits()}
    assert by_name["qwen3-4b"]["quantization"] == "Q4_K_M"
    assert 2.2 * GB < by_name["qwen3-4b"]["size_bytes"] < 2.8 * GB
    assert by_name["gpt-oss-20b"]["quantization"] == "MXFP4_MOE"
    assert by_name["gpt-oss-20b"]["fit"]["group"] != "too big"
    assert by_name["gemma-3-270m"]["size_bytes"] == 253113024
    assert not by_name["gemma-3-270m"]["size_is_estimate"]


def test_mixture_is_as_fast_as_its_active_parameters(machine, list_fits) -> None:
    machine(64 * GB, 40e9, 2)
    speed = {model["name"]: model["fit"]["tokens_per_s"] for model in list_fits("instruct")}
    assert speed["qwen3-30b-a3b-instruct-2507"] > speed["qwen3-4b-instruct-2507"]


def test_list_estimates_the_size_of_every_model(capsys) -> None:
    assert main(["list"]) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    assert all("?" not in [cell.strip() for cell in row[:4]] for row in rows)
    assert all(model.licence for model in load_catalog().values())


@pytest.mark.parametrize(
    ("available", "rate", "threads", "roles"),
    [
        (GB // 4, 10e9, 1, ["tiny"]),
        (12 * GB, 40e9, 2, ["comfortable", "better", "tiny"]),
        (64 * GB, 80e9, 16, ["comfortable", "better", "tiny"]),
    ],
)
def test_first_run_offers_models_that_suit_the_machine(
    machine, available, rate, threads, roles
) -> None:
    machine(available, rate, threads)
    choices = fits.first_run_choices()
    assert [choice.role for choice in choices] == roles
    assert choices[-1].model.name == "smollm2-135m-instruct"
    assert len({choice.model.name for choice in choices}) == len(choices)
    for choice in choices:
        assert choice.role == "tiny" or fits.needed_bytes(choice.model.stored_bytes) <= available
    assert all(choice.tokens_per_s >= fits.READABLE_TOKENS_PER_S for choice in choices)


def test_offered_models_are_chat_models_of_the_catalogue() -> None:
    catalog = load_catalog()
    assert {catalog[name].purpose for name in fits._FIRST_RUN_MODELS} == {"chat"}


def test_models_that_fit_the_card_are_faster_and_offered_first(machine, list_fits, capsys) -> None:
    machine(32 * GB, 20e9, 4)
    without = {model["name"]: model["fit"] for model in list_fits()}
    assert "phi-4" not in {choice.model.name for choice in fits.first_run_choices()}
    machine(32 * GB, 20e9, 4, card_bytes=12 * GB)
    on_card = {model["name"]: model["fit"] for model in list_fits()}
    main(["list", "--fits"])
    note = "speeds are estimates for RTX where WHY says so, otherwise for the CPU"
    assert note in capsys.readouterr().out
    assert on_card["phi-4"]["tokens_per_s"] > 5 * without["phi-4"]["tokens_per_s"]
    assert on_card["phi-4"]["why"].endswith(", on the GPU")
    too_large = [name for name, fit in on_card.items() if fit["needed_bytes"] > 12 * GB]
    assert too_large
    assert [on_card[name] for name in too_large] == [without[name] for name in too_large]
    assert "phi-4" in {choice.model.name for choice in fits.first_run_choices()}
