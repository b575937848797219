"""Layers on a device while an engine answers, on Mesa's software device, in processes of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_decoders import make_qwen2vl
from made_projectors import make_projector
from other_processes import run

from edgeinfer.platform.machine import has_gpu
from edgeinfer.runtime.llama import backends

from ...conftest import BUILD_CACHE, ROOT
from ...made.made_families import make_family
from ...made.made_models import make_llama

SCRIPT = Path(__file__).with_name("device_scenarios.py")
PATIENCE_S = 500
Answers = dict[str, Any]
Scenarios = Callable[..., Answers]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", 512)


@pytest.fixture(scope="module")
def environment(lavapipe: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Devices that fail when a file says so, and compiled shaders that later runs find."""
    if backends.find("vulkan") is None:
        pytest.skip("no Vulkan backend was built: the set-up needs apt for its shader compiler")
    folder = tmp_path_factory.mktemp("failing")
    source = ROOT / "tests/made/failing_vulkan.c"
    library = folder / "failing.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    shaders = BUILD_CACHE / "lavapipe-shaders"
    if os.access(BUILD_CACHE, os.W_OK):
        shaders.mkdir(exist_ok=True)
    if not os.access(shaders, os.W_OK):
        shaders = folder
    return lavapipe | {
        "GGML_VK_VISIBLE_DEVICES": "0",
        "MESA_SHADER_CACHE_DIR": str(shaders),
        "LD_PRELOAD": str(library),
        "PYTHONPATH": str(ROOT),
    }


def start(model: Path, environment: dict[str, str], tmp_path: Path, *names: str) -> Any:
    failing = str(tmp_path / "failing")
    return subprocess.Popen(
        [sys.executable, SCRIPT, str(model), *names],
        env={**os.environ, **environment, "FAILING_VULKAN": failing},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answers(process: Any) -> Answers:
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    found: Answers = json.loads(out.splitlines()[-1])
    return found


@pytest.fixture
def scenarios(model: Path, environment: dict[str, str], tmp_path: Path) -> Scenarios:
    """Run scenarios in a process of their own; return what each answers."""

    def run_scenarios(*names: str, model: Path = model, **variables: str) -> Answers:
        return answers(start(model, environment | variables, tmp_path, *names))

    return run_scenarios


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Answer on the CPU alone."""
    place = tmp_path_factory.mktemp("alone")
    found = answers(start(model, {"PYTHONPATH": str(ROOT)}, place, "cpu", "long"))
    assert found["cpu"]["place"] == found["long"]["place"] == "none"
    return found


def test_all_some_and_no_layers_give_the_cpus_text(scenarios: Scenarios, alone: Answers) -> None:
    found = scenarios("auto", "small", "fits", "named", "one", "while", "all")
    wanted = alone["cpu"]["texts"]
    for name in ("auto", "small", "fits", "named", "one", "all"):
        assert found[name]["texts"] == wanted, name
        assert found[name]["cached"] == alone["cpu"]["cached"] > 0, "what was computed has moved along"
    assert found["one"]["place"] == "1 of 3 on Vulkan0"
    assert found["all"]["place"] == found["fits"]["place"] == "3 of 3 on Vulkan0"
    assert "half of the layers do not fit" in found["small"]["reason"]
    # a software device is nothing to choose by oneself, nor one without room
    assert found["auto"]["place"] == found["small"]["place"] == found["named"]["place"] == "none"
    assert found["auto"]["said"] == found["small"]["said"] == found["one"]["said"] == []
    if not has_gpu():
        assert not found["auto"]["opened"], "nothing is opened where there is nothing to find"
    assert found["one"]["opened"]
    refusal = "vulkan has no device Vulkan9 (`gpu.devices` in config.toml)"
    assert found["named"]["said"] == [f"no layers on a GPU: {refusal}"]
    assert found["while"]["place"] == found["one"]["place"]
    assert found["while"]["texts"] == alone["long"]["texts"]


def test_any_number_of_layers_on_the_device_comes_back_from_the_disk(scenarios: Scenarios) -> None:
    names = [f"stored {n}" for n in range(4)]
    found = scenarios(*names)
    for n, name in enumerate(names):
        assert found[name]["place"] == (f"{n} of 3 on Vulkan0" if n else "none")
        assert found[name]["texts"][:2] == found[name]["texts"][2:], n
        assert found[name]["disk"] == 299, n
        assert found[name]["said"] == []


def test_failing_device_costs_one_line_and_no_answer(scenarios: Scenarios, alone: Answers) -> None:
    names = ("no device", "no memory", "lost")
    # what a lost device leaves is left alone for good, so each has a process
    found = {name: scenarios(name)[name] for name in names}
    for name in names[:2]:
        assert found[name]["texts"] == alone["cpu"]["texts"], name
        assert found[name]["place"] == "none"
    assert found["lost"]["before"] == "1 of 3 on Vulkan0"
    assert found["lost"]["place"] == "none"
    assert found["lost"]["texts"] == [*alone["long"]["texts"], alone["cpu"]["texts"][0]]
    for name, words in (
        ("no device", "could not load"),
        ("no memory", "failed to allocate"),
        ("lost", "Vulkan0 failed, the CPU continues"),
    ):
        (line,) = found[name]["said"]
        assert words in line


@pytest.mark.parametrize("seed", range(8))
def test_random_operations_on_sequences_with_half_of_their_layers_on_a_device(
    model: Path, environment: dict[str, str], seed: int
) -> None:
    """The same thousand operations on the CPU's context give the same logits."""
    script = Path(__file__).with_name("device_histories.py")
    folders = {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/made", "FAILING_VULKAN": "/nowhere"}
    variables = {**os.environ, **environment, **folders}
    done = run(sys.executable, script, model, seed, 1000, env=variables, timeout=PATIENCE_S)
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["place"] == "2 of 3 on Vulkan0"
    assert outcome["steps"] > 250
    assert outcome["largest"] < 0.02, outcome


@pytest.mark.timeout(900)  # some hundred steps of a software GPU
@pytest.mark.parametrize("share", range(4))
def test_process_outlives_a_device_that_is_lost_after_any_submit(
    scenarios: Scenarios, alone: Answers, repeats: Callable[[int], int], share: int
) -> None:
    short, long_prompt = alone["cpu"]["texts"][0], ""
    for n in range(share, repeats(64), 4):
        name = f"lost after {n}"  # a process each: no driver is used after a loss
        found = scenarios(name)[name]
        long_prompt = long_prompt or found["texts"][0]
        assert found["texts"] == [long_prompt, short, short], n
        if found["place"] == "none":
            first, again = found["said"]
            assert "ErrorDeviceLost" in first, n
            assert "ErrorDeviceLost" in found["reason"], n
            assert again.startswith("no layers on a GPU: vulkan: failed before in this process"), n
        else:
            assert found["said"] == [], n


def test_device_that_is_lost_in_a_block_or_at_the_end_leaves_the_process(
    scenarios: Scenarios, alone: Answers
) -> None:
    """llama.cpp copies cells, and frees, in destructors, out of which no exception may come."""
    short = alone["cpu"]["texts"][0]
    for name in ("lost in blocks", "freed"):
        found = scenarios(name)[name]
        assert found["before"] == "3 of 3 on Vulkan0"
        assert set(found["texts"]) == {short}
        if name == "lost in blocks":
            assert found["place"] == "none"
            assert "llama_state_seq_get_data_ext failed: vk::Queue::submit" in found["errors"][0]
            assert len(found["said"]) == 1


def test_engine_closes_while_its_device_does_not_answer(scenarios: Scenarios) -> None:
    assert scenarios("unanswered")["unanswered"]["is_freed"] == [False, True]


def test_card_that_fills_up_gets_a_smaller_try_and_another_backend_its_own(
    scenarios: Scenarios, alone: Answers
) -> None:
    full = scenarios("full")["full"]
    assert full["place"] == "2 of 3 on Vulkan0"
    other = scenarios("next", GGML_VK_VISIBLE_DEVICES="0,0")["next"]
    assert other["place"] == "3 of 3 on Vulkan1"
    for found in (full, other):
        assert found["texts"] == alone["cpu"]["texts"]
        assert found["said"] == []


def test_context_of_a_small_device_is_shorter_and_longer_requests_end_on_the_cpu_first(
    scenarios: Scenarios,
) -> None:
    found = scenarios("shorter")["shorter"]
    long, short = found["texts"][0], found["texts"][2]
    assert found["texts"] == [long, long, short, short, short, long]
    assert found["place"] == "2 of 3 on Vulkan0"
    assert found["n_ctx"] == [512, 256, 512]
    assert found["cells"] == 256
    assert "the context of 256" in found["refused"]
    assert len(found["said"]) == 1


def test_experts_stay_with_the_cpu_first_and_two_devices_share_the_layers(
    scenarios: Scenarios, tmp_path: Path
) -> None:
    mixture = make_family(tmp_path / "mixture.gguf", "Mixtral (a mixture of experts)")
    alone = answers(start(mixture, {"PYTHONPATH": str(ROOT)}, tmp_path, "cpu"))["cpu"]
    few = scenarios("experts", model=mixture)["experts"]
    assert few["place"] == "3 of 3 on Vulkan0, experts of 2 on the CPU"
    two = scenarios("two", model=mixture, GGML_VK_VISIBLE_DEVICES="0,0")["two"]
    assert two["place"] == "3 of 3 on Vulkan0 and Vulkan1"
    assert few["texts"] == two["texts"] == alone["texts"]


def test_two_processes_share_a_device(
    model: Path, environment: dict[str, str], alone: Answers, tmp_path: Path
) -> None:
    both = [start(model, environment, tmp_path, "one") for _ in range(2)]
    for process in both:
        found = answers(process)["one"]
        assert found["texts"] == alone["cpu"]["texts"]
        assert found["place"] == "1 of 3 on Vulkan0"


@pytest.mark.needs("encoder")
@pytest.mark.model
def test_pictures_are_encoded_on_the_device_until_it_fails(
    scenarios: Scenarios, smollm2: Path, tmp_path: Path
) -> None:
    model = make_qwen2vl(tmp_path / "text.gguf", smollm2)
    projector = str(make_projector(tmp_path / "mmproj.gguf", "qwen2vl_merger", 64))
    found = scenarios("pictures", model=model, PROJECTOR=projector)["pictures"]
    assert found["moved"] == [False, True, False]
    assert 0 < found["difference"] < 0.02
    assert found["is_equal"] == [False, True], "the CPU has encoded the last one"
    (line,) = found["said"]
    assert line.startswith("a GPU could not encode a picture, so the CPU does")
    assert "ErrorDeviceLost" in line
    name = "pictures without room"
    found = scenarios(name, model=model, PROJECTOR=projector)[name]
    assert found["moved"] == [False, False, False]
    assert found["is_equal"] == [True, True]
    assert "; the CPU encodes pictures: " in found["reason"]
    assert found["said"] == []


def test_show_describes_the_offload(model: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "edgeinfer", "show", str(model), "--gpu-layers", "2"]
    env = {**os.environ, **environment, "FAILING_VULKAN": "/nowhere"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120)
    rows = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert rows[-2:] == ["layers on GPUs", "memory of GPUs"]
    assert "2 of 3 on Vulkan0: as asked" in done.stdout
