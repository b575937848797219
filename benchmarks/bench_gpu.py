"""Layers on GPUs: resume to first token, prefill and decode, the CPU against each device and split.

    bench_gpu.py [--models tiny,small,4b-q4_k_m] [--runs 5] [--software] [--out docs/figures]

Each side is an endpoint resumed from the same snapshot: on the CPU, with all layers on a device, with
half of them, and with all distributed over all devices of a backend. EDGEINFER_LLAMA_BENCH names a
llama-bench of the same llama.cpp build, which then runs with the same backend libraries. A machine
without a device gets a row that says so; --software uses the tests' Mesa software device, which is
slower than any CPU and only shows that everything runs. A SHAPE-TYPE like 4b-q4_k_m is a model with
random weights, `tiny` a small one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench_resume import MODELS, Bench
from common import CACHE, ROOT, SHAPES, call, make_parser, random_model, spread, write_figure

sys.path.insert(0, str(ROOT / "tests/made"))
from made_models import make_llama

from edgeinfer.bench import markdown
from edgeinfer.runtime.layer_plan import Device
from edgeinfer.runtime.llama import backends
from edgeinfer.runtime.llama.backends import LoadedBackend, device_line

PORT = 18420
#: How long (s) to wait for a device: a software device compiles its kernels at the first step.
ATTACH_S = 600.0


class Side(NamedTuple):
    """One placement of the layers: description, value of `--gpu-layers`, names of the devices."""

    label: str
    layers: str
    devices: tuple[str, ...] = ()


class Found(NamedTuple):
    """Results: seconds to attach; of each run, ms to a first token, tokens/s of prefill and decode."""

    attach_s: float | None
    first_ms: Sequence[float]
    read: Sequence[float]
    written: Sequence[float]


class GpuBench(Bench):
    """The measurements of one machine, with its own home like `Bench`."""

    def prepare(self) -> tuple[list[Device], list[str]]:
        """Return the devices to measure, and for each backend that cannot be used the reason."""
        data = self.work / "home/data"
        data.mkdir(parents=True)
        if self.options.software:
            self._take_software()
        elif backends.added_dir().is_dir():
            (data / "backends").symlink_to(backends.added_dir())
        os.environ.update(self.environment)
        answers = [backends.ask(file.name) for file in backends.available()]
        devices = [d for answer in answers if isinstance(answer, LoadedBackend) for d in answer.devices]
        kinds = ("software",) if self.options.software else ("gpu", "integrated")
        absent = [f"{a.name}: {a.reason}" for a in answers if not isinstance(a, LoadedBackend)]
        return [d for d in devices if d.kind in kinds], absent

    def _take_software(self) -> None:
        """Copy the backend and a loader to this home's backend folder: a resumed process ignores
        LD_LIBRARY_PATH. Without the tests' copy of Mesa, the system's is used, if there is one.
        """
        self.environment["GGML_VK_VISIBLE_DEVICES"] = "0"
        file, mesa = backends.find("vulkan"), CACHE / "lavapipe"
        if file is None or not mesa.is_dir():
            absent = "the Vulkan backend (make gpu)" if file is None else f"Mesa's loader ({mesa})"
            print(f"{absent} is not here: only what the system has is measured", file=sys.stderr)
            return
        folder, library = self.work / "home/data/backends", Path(file.path)
        folder.mkdir(parents=True)
        for path in (library, backends.facts_path(library), mesa / "loader/libvulkan.so.1"):
            shutil.copy(path, folder)
        driver = str(mesa / "lvp_icd.json")
        self.environment |= {"VK_DRIVER_FILES": driver, "VK_ICD_FILENAMES": driver}

    def _model(self, name: str) -> Path:
        if "-" in name:
            return random_model(name, self.models)
        if name != "tiny":
            return super()._model(name)
        self.models.mkdir(parents=True, exist_ok=True)
        return make_llama(self.models / "tiny.gguf", 4096)

    def sides(self, name: str, devices: list[Device]) -> list[Side]:
        """List the placements to measure. The output counts as a layer."""
        half = str((self.json("show", name)["header"]["n_layer"] + 1) // 2)
        all_sides = [Side("CPU", "none")]
        for device in devices:
            for layers in ("all", half):
                all_sides.append(Side(f"{layers} on {device.name}", layers, (device.name,)))
        for backend in dict.fromkeys(device.backend for device in devices):
            names = tuple(device.name for device in devices if device.backend == backend)
            if len(names) > 1:
                all_sides.append(Side(f"all on {' and '.join(names)}", "all", names))
        return all_sides

    def measure_sides(self, name: str, devices: list[Device]) -> dict[str, Found]:
        """Measure every side of a model, one after the other."""
        model = self._model(name)
        self.edgeinfer("pull", str(model), "--name", name, "--in-place", "--quiet")
        self.json("warm", name, "--quiet")
        self._launch(name)  # from here on the page cache is hot
        by_side = {}
        for side in self.sides(name, devices):
            by_side[side.label] = self._measure_side(name, side)
            print(f"{name}, {side.label}: {by_side[side.label]}", file=sys.stderr, flush=True)
        peer = self._peer_rates(model, devices) if devices and not self.options.software else {}
        self.edgeinfer("snapshots", "rm", name)
        return by_side | peer

    def _measure_side(self, name: str, side: Side) -> Found:
        folder = self.work / "home/config"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(f"[gpu]\ndevices = {json.dumps(side.devices)}\n")
        layers = ("--gpu-layers", side.layers)
        first = [self._launch(name, *layers)["first_token"] for _ in range(self.options.runs)]
        began = time.monotonic()
        with self._endpoint(name, PORT, "--resume=always", *layers):
            attached = bool(side.devices) and _has_layers_on_device(PORT)
            attach_s = time.monotonic() - began if attached else None
            turns = [self._turn(PORT, n) for n in range(self.options.runs)]
        return Found(attach_s, first, *zip(*turns, strict=True))

    def _turn(self, port: int, n: int) -> tuple[float, float]:
        """Return tokens/s of an uncached prompt, and of its answer."""
        prompt = [97 + (31 * n + 7 * i) % 26 for i in range(self.options.prompt)]
        body = {"prompt": prompt, "n_predict": self.options.tokens, "temperature": 1, "seed": 7}
        body |= {"ignore_eos": True, "cache_prompt": False}
        timings = call(port, "/completion", body)["timings"]
        return timings["prompt_per_second"], timings["predicted_per_second"]

    def _peer_rates(self, model: Path, devices: list[Device]) -> dict[str, Found]:
        """Run llama-bench of the same build with the same backend libraries, all layers on one device."""
        program = os.environ.get("EDGEINFER_LLAMA_BENCH")
        rates = {}
        for device in devices if program else ():
            file = backends.find(device.backend)
            assert file is not None
            tests = f"-p {self.options.prompt} -n {self.options.tokens} -r {self.options.runs} -o json"
            command = [program, "-m", str(model), "-ngl", "999", "-dev", device.name, *tests.split()]
            environment = os.environ | {"GGML_BACKEND_PATH": file.path}
            done = subprocess.run(command, env=environment, capture_output=True, check=True)
            read, written = (test["samples_ts"] for test in json.loads(done.stdout))
            rates[f"llama-bench, all on {device.name}"] = Found(None, (), read, written)
        return rates


def _has_layers_on_device(port: int) -> bool:
    """Wait until layers are on a device. Raises SystemExit after a timeout."""
    deadline = time.monotonic() + ATTACH_S
    while time.monotonic() < deadline:
        (model,) = call(port, "/props", method="GET")["models"]
        if model["state"] == "loaded" and model["info"]["choices"]["gpu_layers"]["value"] != "none":
            return True
        time.sleep(0.01)
    raise SystemExit("error: no device was attached\n\nhint: edgeinfer doctor")


def table(
    rates_by_model: dict[str, dict[str, Found]], devices: list[Device], absent: list[str], n: int
) -> str:
    """Return the figure: devices, then a row for each side, medians with the spread."""
    if not devices and not absent:
        absent = ["no backend library"]
    lines = [f"- {device_line(device)}" for device in devices]
    lines += [f"- no device: {reason}" for reason in absent]
    rows = []
    for name, sides in rates_by_model.items():
        for title, rates in sides.items():
            after = "" if rates.attach_s is None else f"{rates.attach_s:.2f} s"
            tokens = (_spread(samples, "/s") for samples in (rates.read, rates.written))
            rows.append([f"{name}, {title}", after, _spread(rates.first_ms, "ms"), *tokens])
        if not devices:
            rows.append([f"{name}, GPU", "no device", "", "", ""])
    head = ["", "attached after", "first token", f"prompt of {n}", "answer"]
    return "\n".join([*lines, "", markdown(head, rows)])


def _spread(values: Sequence[float], unit: str) -> str:
    if not values:
        return ""
    return spread(values, unit, 0 if min(values) >= 100 else 1)


def main() -> None:
    """Write OUT/gpu.md."""
    parser = make_parser(__doc__)
    models = f"of tiny, {', '.join(MODELS)}; SHAPE-TYPE of {', '.join(SHAPES)}"
    parser.add_argument("--models", default="small", help=models)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--software", action="store_true", help="use Mesa's software device")
    parser.add_argument("--work", default=None, help="folder with space for models, not on tmpfs")
    parser.set_defaults(small=None, model_folder=None, keep=False)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-gpu-", dir=options.work) as work:
        bench = GpuBench(options, Path(work))
        devices, absent = bench.prepare()
        names = options.models.split(",")
        rates_by_model = {name: bench.measure_sides(name, devices) for name in names}
    figure = table(rates_by_model, devices, absent, options.prompt)
    sys.stdout.write(write_figure(options.out, "gpu", figure))


if __name__ == "__main__":
    main()
