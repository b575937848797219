"""`edgeinfer bench`: servers of every kind on real sockets, and the machine's energy counters."""

import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from edgeinfer.bench import _LONG, MeasuredServer, Plan, Sample, Target, measure, rows
from edgeinfer.cli.main import main
from edgeinfer.cli.verbs.bench import BenchResult
from edgeinfer.errors import ServeError
from edgeinfer.platform import paths
from edgeinfer.platform.energy import EnergyMeter

PLAN = Plan(pp=64, tg=8, depths=(0, 32), streams=(1, 3), rounds=2)
EVERY_TEST = {"tg8", "pp64", "turn 64", "tg8 @d32", "pp64 @d32", "turn 96", "tg8 x3"}


class Other(ThreadingHTTPServer):
    """A server of another program, where a word is a token; keywords change what it supports."""

    fields = completions = usage = cached = True
    body = says = b""
    shorter = 0

    def __init__(self, **changed):
        vars(self).update(changed)
        self.requests = []
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Other

    def log_message(self, *_):
        pass

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = False  # some servers ignore `connection: close`

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append((self.path, asked, self.headers.get("authorization")))
        if self.server.says:
            return self.answer(401, self.server.says)
        if self.path == "/v1/completions" and not self.server.completions:
            return self.answer(404, b"no such route")
        if "ignore_eos" in asked and not self.server.fields:
            return self.answer(400, b"\x1b[31munknown field")
        if self.server.body:
            return self.answer(200, self.server.body)
        text = asked.get("prompt") or asked["messages"][0]["content"]
        n = max(1, asked["max_tokens"] - self.server.shorter)
        usage = {"prompt_tokens": len(text.split()) + 3, "completion_tokens": n}
        if self.server.cached:
            usage["prompt_tokens_details"] = {"cached_tokens": 2}
        word = {"delta": {"content": "w"}} if "messages" in asked else {"text": "w"}
        events = [{"choices": [word]} for _ in range(n)]
        events += [{"choices": [], "usage": usage}] if self.server.usage else []
        self.send_response(200)
        self.end_headers()  # no Content-Length: the body ends when the connection does
        for event in events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            time.sleep(0.002)  # time per token
        return self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def other():
    servers = []

    def start(**lacks):
        servers.append(Other(**lacks))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("lacks", "path", "note"),
    [
        ({}, "/v1/completions", ""),
        ({"fields": False}, "/v1/completions", ""),
        ({"fields": False, "completions": False}, "/v1/chat/completions", ""),
        ({"shorter": 1}, "/v1/completions", "answers ended before 8 tokens"),
        ({"cached": False}, "/v1/completions", "reports no cached tokens"),
    ],
)
async def test_every_test_of_any_openai_compatible_server(other, lacks, path, note):
    server = other(**lacks)
    side = MeasuredServer("theirs", Target(url=server.url, model="m", key="secret"), "bench-1")
    rounds, noise = await measure([side], PLAN, lambda stage, fraction: None)
    assert [set(samples) for samples in rounds[0].values()] == [EVERY_TEST]
    assert len(noise) == PLAN.rounds
    assert all(sample.value > 0 for samples in rounds for sample in samples["theirs"].values())
    assert {key for *_, key in server.requests} == {"Bearer secret"}
    asked = server.requests[-1]
    assert (asked[0], asked[1]["model"]) == (path, "m")
    assert len(side.notes) == bool(note)
    assert note in " ".join(side.notes)
    prompts = [body.get("prompt") or body["messages"][0]["content"] for _, body, _ in server.requests]
    assert {len(text.split()) + 3 for text in prompts} >= {64, 32, 96}, "lengths are of its own tokens"


async def test_no_server_is_asked_what_another_may_have_cached(other):
    servers = [other(), other()]
    sides = [MeasuredServer(server.url, Target(url=server.url), "bench-1") for server in servers]
    await measure(sides, PLAN, lambda stage, fraction: None)
    lone = [{body["prompt"] for _, body, _ in server.requests} for server in servers]
    assert {text[:20] for text in lone[0] & lone[1]} <= {_LONG[:20]}


@pytest.mark.parametrize(
    ("lacks", "message"),
    [
        ({"usage": False}, "no text, or no token counts"),
        ({"says": b"\x1b[31mno"}, "answered 401: .*no$"),
        ({"body": b"<html>"}, "no text, or no token counts"),
        ({"body": b'data: [{"choices": 1}]\n\n'}, "no text, or no token counts"),
        ({"body": b'data: {"choices": [{"text": 1}], "usage": []}\n'}, "no text, or"),
    ],
)
async def test_server_that_cannot_be_measured_is_named(other, lacks, message, monkeypatch):
    monkeypatch.setattr("edgeinfer.bench._MOST_S", 10)
    side = MeasuredServer("theirs", Target(url=other(**lacks).url), "bench-1")
    with pytest.raises(ServeError, match=message):
        await side.prepare()


async def test_unreachable_server_and_an_endless_answer(other, monkeypatch):
    server = other(body=b"data: {}\n" * 10_000)
    monkeypatch.setattr("edgeinfer.bench._MOST_BYTES", 5000)
    with pytest.raises(ServeError):
        await MeasuredServer("theirs", Target(url=server.url), "bench-1").prepare()
    with pytest.raises(ServeError, match="does not answer: Connection refused"):
        await MeasuredServer("theirs", Target(url="http://127.0.0.1:1"), "bench-1").prepare()


def test_rows_compare_each_round_with_the_first_server():
    rounds = [
        {"a": {"pp": Sample(10, "tokens/s")}, "b": {"pp": Sample(20, "tokens/s", 0.5)}},
        {
            "a": {"pp": Sample(30, "tokens/s")},
            "b": {"pp": Sample(30, "tokens/s", 1.5), "x": Sample(1, "ms")},
        },
    ]
    a, b, only = rows(rounds, ["a", "b"])
    assert (a.median, a.least, a.greatest, a.beside, a.joules_per_token) == (20, 10, 30, None, None)
    assert (b.median, b.beside, b.joules_per_token) == (25, 1.5, 1.0)
    assert (only.side, only.test, only.beside) == ("b", "x", None)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["-p", "0", "-n", "0"], "nothing to measure"),
        (["--against", "localhost:80"], "is not http://HOST:PORT"),
        (["--against", "http://key@host"], "is not http://HOST:PORT"),
        (["--against", "http://host:99999"], "is not http://HOST:PORT"),
        (["-d", "x"], "is not a number"),
    ],
)
def test_mistakes_are_named_before_a_model_is_loaded(typed, message, capsys):
    assert main(["bench", "none.gguf", *typed]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.model
def test_own_model_beside_a_server_in_one_run(smollm2, other, as_json):
    typed = ["bench", str(smollm2), "-p", "32", "-n", "4", "-r", "2", "--ctx", "512", "--quiet"]
    typed += ["--against", other().url]
    result = as_json(*typed)
    own_model, other_server = "SmolLM2-135M-Instruct.Q4_1", typed[-1].removeprefix("http://")
    assert {(row["side"], row["test"]) for row in result["rows"]} == {
        *((side, test) for side in (own_model, other_server) for test in ("tg4", "pp32", "turn 32")),
        (own_model, "exec to token, cold"),
        (own_model, "exec to turn 32, restarted"),
    }
    assert all(len(row["samples"]) == 2 for row in result["rows"])
    assert result["energy"].startswith("not readable: ") or result["energy"]
    assert not list(paths.state_dir().glob("drift.db")), "its answers are not counted"
    assert not list((paths.blocks_dir() / "owners").iterdir()), "its prompts do not stay on disk"
    shown = msgspec.convert(result, BenchResult).human()
    assert re.search(rf"(?m)^{own_model} +\| pp32 +\|", shown), "a Markdown table"
    assert re.search(r"(?m)^---( +\| +---)+$", shown)
    assert "- pp: prefill; tg: generation" in shown
    assert "- noise: reference job" in shown
    assert "- energy: " in shown


def machine(folder, **files):
    """Write files as in /sys; the keyword `a__b_c` is the file a/b_c."""
    for name, text in files.items():
        path = folder / "class" / name.replace("__", "/").replace("COLON", ":")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return EnergyMeter(folder)


RAPL = {
    "powercap__intel-raplCOLON0__name": "package-0",
    "powercap__intel-raplCOLON0__max_energy_range_uj": 10_000_000,
    "powercap__intel-raplCOLON0__energy_uj": 9_000_000,
    "powercap__intel-raplCOLON0COLON0__name": "core",
    "powercap__intel-raplCOLON0COLON0__energy_uj": 5_000_000,
}


def test_rapl_counts_packages_alone_and_wraps(tmp_path):
    battery = {"power_supply__BAT0__status": "Discharging", "power_supply__BAT0__power_now": 1}
    meter = machine(tmp_path, **RAPL, **battery)
    assert (meter.read_joules(), meter.reason) == (0.0, "")
    assert "RAPL" in meter.source
    counter = tmp_path / "class/powercap/intel-rapl:0/energy_uj"
    counter.write_text("500000\n")  # the counter has wrapped: the value is below the last one
    assert meter.read_joules() == pytest.approx(1.5)
    counter.unlink()
    assert meter.read_joules() is None
    assert "no longer reported" in meter.reason


def test_sockets_of_hwmon_are_added(tmp_path):
    sensors = {"energy1_label": "Ecore000", "energy2_label": "Esocket0"}
    sensors |= {"energy1_input": 9, "energy2_input": 9}
    meter = machine(tmp_path, **{f"hwmon__hwmon0__{name}": text for name, text in sensors.items()})
    meter.read_joules()
    (tmp_path / "class/hwmon/hwmon0/energy2_input").write_text("3000009")
    assert meter.read_joules() == pytest.approx(3.0)


@pytest.mark.parametrize("status", ["Discharging", "Charging"])
def test_battery_is_integrated_while_it_is_in_use(tmp_path, status):
    battery = {"power_supply__BAT0__status": status, "power_supply__BAT0__power_now": 20_000_000}
    meter = machine(tmp_path, **battery)
    first = meter.read_joules()
    if status == "Charging":
        assert (first, meter.source) == (None, "")
        assert "virtual machines have none" in meter.reason
        return
    assert "battery" in meter.source
    while not (used := meter.read_joules()):
        pass
    assert used < 20 * 60
    (tmp_path / "class/power_supply/BAT0/status").write_text("Charging")
    assert meter.read_joules() is None


def test_counter_that_cannot_be_read_is_named(tmp_path):
    machine(tmp_path, **RAPL)
    counter = tmp_path / "class/powercap/intel-rapl:0/energy_uj"
    counter.unlink()
    counter.mkdir()  # a folder: root could read a file without permissions
    assert EnergyMeter(tmp_path).reason == f"this user may not read {counter}"
