"""Drift: the counts of answers, and the comparison of two weeks."""

import itertools
import random
import re
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from datetime import date, timedelta

import numpy as np
import pytest

from edgeinfer.cli.main import main
from edgeinfer.config.config_file import Config, DriftConfig
from edgeinfer.host import EngineHost
from edgeinfer.runtime.engine import LlamaEngine
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.runtime.requests import Message, Tool, ToolChoice
from edgeinfer.usage.daily_counts import DriftRecorder, drift_path, read_week
from edgeinfer.usage.drift import compare

from ..runtime.conftest import answers, ask, load

LAST = date(2026, 11, 22)
ENGLISH = """The ferry leaves the harbour twice a day. Nobody had painted the fence since spring. A good
knife keeps its edge for years. The committee will meet again on Thursday. Snow fell until noon. Her
brother repairs old clocks. We walked along the river and counted herons.""".split(". ")
RUSSIAN = ["Зимой река замерзает.", "Поезд опаздывает.", "Мой брат чинит часы."]
UNIT = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}
WEATHER = Tool(name="weather", parameters=UNIT | {"additionalProperties": False})
ROMAN, KEY = "tell me of the romans", "the colour of the key is green"


@pytest.fixture(scope="module")
def engine(smollm2):
    with closing(load(smollm2)) as opened:
        yield opened


@pytest.fixture
def recording_engine(engine: LlamaEngine) -> Iterator[LlamaEngine]:
    """An engine whose answers are counted in this test's home folder."""
    engine.add_observer(recorder := DriftRecorder(drift_path(), "small", "ab" * 32))
    yield engine
    engine._core.queue.observers = ()
    recorder.close()


def chat(text: str, **fields):
    return ask(None, messages=(Message(role="user", content=text),), **fields)


def flush(engine) -> None:
    """Wait until the counts are written. (They are queued before an answer's last event.)"""
    [recorder] = engine._core.queue.observers
    recorder._writer.submit(int).result()


def week(engine, last: date, draw) -> None:
    """Record answers on the seven days up to `last`: they are recorded today and then dated back."""
    for n in range(7):
        answers(engine, [draw() for _ in range(18)])
        flush(engine)
        day, today = (last - timedelta(n)).isoformat(), date.today().isoformat()
        with closing(sqlite3.connect(drift_path())) as db, db:
            db.execute("UPDATE count SET day = ? WHERE day = ?", (day, today))


def moved_aggregates(as_json, until: date, code: int) -> dict[str, dict]:
    report = as_json("drift", "small", "--until", until.isoformat(), code=code)
    return {c["aggregate"]: c for c in report["models"]["small"] if c["moved"]}


@pytest.mark.needs("time")
@pytest.mark.model
def test_an_injected_drift_is_named_and_an_equal_week_is_not(recording_engine, as_json, capsys):
    rng = random.Random(31)

    def usual():
        if rng.random() < 0.4:
            call = {"tools": (WEATHER,), "tool_choice": ToolChoice(mode="required")}
            return chat(rng.choice(ENGLISH), max_tokens=40, ignore_eos=False, **call)
        return chat(" ".join(rng.choices(ENGLISH, k=rng.randint(2, 9))), max_tokens=4)

    def changed_answer():
        if rng.random() < 0.4:  # with 8 tokens, the tool call is cut off
            call = {"tools": (WEATHER,), "tool_choice": ToolChoice(mode="required")}
            return chat(rng.choice(RUSSIAN), max_tokens=8, ignore_eos=False, **call)
        return chat(rng.choice(RUSSIAN), max_tokens=4)

    week(recording_engine, LAST, usual)
    week(recording_engine, LAST + timedelta(7), usual)
    week(recording_engine, LAST + timedelta(14), changed_answer)
    with closing(sqlite3.connect(drift_path())) as db, db:  # times vary with the load
        db.execute("DELETE FROM count WHERE aggregate LIKE '%_ms'")
    assert not moved_aggregates(as_json, LAST + timedelta(7), code=0)
    changes = moved_aggregates(as_json, LAST + timedelta(14), code=1)
    assert {"prompt_tokens", "prompt_chars_per_token", "prompt_script", "tool_calls"} <= changes.keys()
    assert changes["prompt_script"]["now"] == "cyrillic 100%"
    assert changes["tool_calls"]["now"] == "broken 100%"
    assert {"model_file", "program", "turns", "kind", "temperature"}.isdisjoint(changes)
    assert main(["drift", "--until", (LAST + timedelta(14)).isoformat()]) == 1
    shown = capsys.readouterr().out
    assert "small, week to 2026-12-06 compared with week to 2026-11-29:" in shown
    assert "prompt script" in shown


@pytest.mark.model
def test_no_text_is_kept(recording_engine):
    for prompt in (ROMAN, KEY):
        (said,) = answers(recording_engine, [chat(prompt, max_tokens=20)])
    flush(recording_engine)
    kept = drift_path().read_bytes().decode("latin-1").lower()
    words = {word for text in (ROMAN, KEY, said.text.lower()) for word in text.split() if len(word) > 4}
    assert words
    assert not {word for word in words if word in kept}
    assert drift_path().stat().st_mode & 0o777 == 0o600
    counts = read_week(drift_path(), date.today())["small"]
    assert len(counts) > 15
    always = counts["prompt_tokens"], counts["refusal"], counts["program"]
    assert [bins.total() for days in always for bins in days.values()] == [2, 2, 2]


@pytest.mark.model
@pytest.mark.parametrize("record", [True, False])
def test_answers_are_counted_unless_that_is_switched_off(smollm2, record):
    host = EngineHost(config=Config(drift=DriftConfig(record=record)))
    with closing(load(smollm2, n_ctx=256, n_parallel=1)) as engine:
        host.record_drift(engine, ModelFiles(name="small", paths=(str(smollm2),)), LoadOptions())
        answers(engine, [ask(max_tokens=0), ask(max_tokens=2)])
    assert drift_path().exists() == record
    if record:  # the request with `max_tokens` 0 has no answer and is not counted
        answer_tokens = read_week(drift_path(), date.today())["small"]["answer_tokens"]
        assert answer_tokens[date.today().isoformat()].total() == 1


@pytest.mark.parametrize("fault", ["folder", "locked", "damaged"])
def test_counts_that_cannot_be_written_cost_no_answer(fault, tmp_path):
    path = tmp_path / "state/drift.db"
    recorder = DriftRecorder(path, "m", "")
    counts = (LAST, [("turns", 0, 1)])
    if fault == "folder":
        path.parent.write_text("")
    else:
        path.parent.mkdir()
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        other.execute("BEGIN EXCLUSIVE") if fault == "locked" else path.write_bytes(b"no database" * 99)
    first = recorder._writer.submit(recorder._write, *counts)
    if fault == "locked":
        other.close()
    first.result()
    if fault == "folder":
        path.parent.unlink()
    recorder._write(*counts)
    recorder.close()
    written = 2 if fault == "locked" else 1
    assert read_week(path, LAST)["m"]["turns"] == {"2026-11-22": Counter({0: written})}
    assert path.with_suffix(".damaged").exists() == (fault == "damaged")


def test_verb_says_what_is_missing_or_damaged(capsys):
    assert main(["drift"]) == 0
    assert "no answers were recorded in the weeks that end on " in capsys.readouterr().out
    assert main(["drift", "qwen3-4b"]) == 2
    assert "no answers of qwen3-4b were recorded in the weeks that end on " in capsys.readouterr().err
    assert main(["drift", "--until", "tomorrow"]) == 2
    assert "'tomorrow' is not a date; use YYYY-MM-DD" in capsys.readouterr().err
    assert main(["drift", "--until", "2026-11-22", "--against", "2026-11-16"]) == 2
    assert "overlap" in capsys.readouterr().err
    drift_path().mkdir(parents=True)
    assert main(["drift"]) == 1
    shown = capsys.readouterr().err
    assert "try again" in shown
    assert "remove" not in shown
    drift_path().rmdir()
    drift_path().write_bytes(b"no database" * 99)
    assert main(["drift"]) == 1
    assert f"remove {drift_path()}" in capsys.readouterr().err


def simulate_week(
    rng: np.random.Generator, day: date, n_days: int, sessions: int, size: int, among: float
):
    """Return counts of 20 values on `n_days` days, of `sessions` sessions with `size` answers (means).

    Answers of one session are similar. `among`: how much days differ from each other.
    """
    n = rng.poisson(sessions)
    sizes = rng.geometric(1 / size, n)
    days = np.repeat(rng.integers(0, n_days, n), sizes)
    table = {}
    for k in range(20):
        level = np.repeat(rng.normal(k % 10, 0.3, n), sizes) + rng.normal(0, among, n_days)[days]
        values: np.ndarray = np.floor(4 * rng.normal(level, 0.9)).astype(int)
        if k >= 13:
            values = np.where(values > 2 * (k - 13), "yes", "no")
        by_day = table[f"value{k}"] = {}
        for d in np.unique(days).tolist():
            by_day[(day + timedelta(d)).isoformat()] = Counter(values[days == d].tolist())
    return table


@pytest.mark.needs("time")
@pytest.mark.slow
@pytest.mark.parametrize("like", [(7, 40, 4, 0.0), (3, 60, 16, 0.4), (4, 60, 16, 0.4)])
def test_a_thousand_weeks_without_a_change_give_no_more_than_ten_alarms(like):
    rng = np.random.default_rng(31)
    weeks = [simulate_week(rng, LAST + timedelta(7 * n), *like) for n in range(1001)]
    comparisons = [compare(before, now) for before, now in itertools.pairwise(weeks)]
    assert np.mean([len(changes) for changes in comparisons]) > 5
    assert sum(any(change.moved for change in changes) for changes in comparisons) <= 10


def test_sums_by_day_are_shown_by_ps_and_no_part_of_drift(recording_engine, as_json, capsys):
    assert as_json("ps", "--usage")["days"] == []
    prompt = "The harbour is open all year, and the ferry leaves at nine. " * 8
    ends = [one.finish for one in answers(recording_engine, [ask(prompt)] * 2)]
    flush(recording_engine)
    with closing(sqlite3.connect(drift_path())) as db, db:
        db.execute(
            "INSERT INTO count SELECT day, model, 'newer', bin, 1 FROM count WHERE aggregate = 'requests'"
        )
    [day] = as_json("ps", "--usage")["days"]
    assert (day["day"], day["model"], day["requests"]) == (date.today().isoformat(), "small", 2)
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
        assert day[name] == sum(getattr(end.usage, name) for end in ends)
    busy_ms = sum(end.timings.total_ms - end.timings.queue_ms for end in ends)
    assert day["busy_ms"] == pytest.approx(busy_ms, abs=1)
    assert not {"requests", "busy_ms"} & read_week(drift_path(), date.today())["small"].keys()
    assert main(["ps", "--usage"], EngineHost(config=Config(drift=DriftConfig(record=False)))) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^\d{4}-\d\d-\d\d +small +2 ", shown, re.MULTILINE)
    assert "usage is not recorded" in shown


def test_answer_is_counted_before_its_end_is_seen(engine):
    """A process that exits after the last event, as `run` does, loses no count."""
    seen = threading.Event()

    class Late(DriftRecorder):
        def note(self, *said):
            self.was_late = seen.wait(0.3)

    engine.add_observer(recorder := Late(drift_path(), "small", ""))
    list(engine.submit(ask()))
    seen.set()
    assert recorder.was_late is False
