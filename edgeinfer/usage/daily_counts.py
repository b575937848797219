"""Daily histograms of a model's requests and answers, for `ps --usage` and `drift`.

Each ended generation gives about 20 values (prompt tokens, TTFT, language, …). A value is counted in a
bin; numbers have four bins per doubling: 1 to 1.19, 1.19 to 1.41, … The SQLite file has only counts per
day, and nothing about single requests.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import sqlite3
import threading
import unicodedata
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from edgeinfer import __version__
from edgeinfer.errors import EngineError, StoreError
from edgeinfer.platform import paths
from edgeinfer.runtime.event_stream import CollectedAnswer
from edgeinfer.runtime.events import Event, Finished
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.runtime.sampling.logprobs import LogSum
from edgeinfer.runtime.scheduler.observer import SequenceObserver

_log = logging.getLogger("edgeinfer.drift")

#: The log probability of every 16th token is computed, because each takes 0.1 to 0.5 ms.
_LOGPROB_EVERY = 16
_KEPT_DAYS = 182
#: Maximum number of answers that wait to be written to the file. Further answers are not counted.
_MAX_WAITING = 1000
#: How long (s) a write waits while another process locks the file.
_LOCKED_S = 1.0
_CLOSING_S = 2.0
BINS_PER_DOUBLING = 4
_MIN, _MAX = 2.0**-6, 2.0**30
SHARE_BINS = 20
_SEEN_CHARS = 300
_REFUSAL = re.compile(
    r"\bI(?:'|’)?m sorry,? but\b|\bas an ai\b|\bje (?:ne peux|suis désolé)|\btut mir leid\b"
    r"|\bI (?:cannot|can(?:'|’)t|won(?:'|’)t|am (?:unable|not able) to) "
    r"(?:help|assist|provide|answer|comply|fulfil|support|engage|discuss|create)"
    r"|\blo siento\b|\bno puedo (?:ayudar|responder)",
    re.IGNORECASE,
)
_TABLE = (
    "CREATE TABLE IF NOT EXISTS count (day TEXT, model TEXT, aggregate TEXT, bin, n INTEGER, "
    "PRIMARY KEY (day, model, aggregate, bin)) WITHOUT ROWID"
)
_ADD = "INSERT INTO count VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n"

#: Value of the column `bin` in rows whose `n` is not a number of answers, but a sum, e.g. of the day's
#: prompt tokens. `ps --usage` shows these rows; `drift` skips them.
_SUM = "sum"
#: Number of a bin, or a category like "stop".
Bin = int | str
#: Name of a value ("ttft_ms") → day (ISO) → bin → number of answers.
Counts = dict[str, dict[str, Counter[Bin]]]


def drift_path() -> Path:
    """Return the path of drift.db, the SQLite file with the daily counts of all models' answers."""
    return paths.state_dir() / "drift.db"


class DriftRecorder:
    """Counts values of one model's answers (tokens, times, finish reasons, …) by day.

    `edgeinfer drift` compares the counts of two weeks; `ps --usage` shows each day's sums. A thread
    adds the counts to the SQLite file `path`, so that no answer waits for the disk.
    """

    def __init__(self, path: Path, model: str, sha256: str) -> None:
        self._path, self._model = path, model
        self._constant = {"model_file": sha256[:12] or "unknown", "program": __version__}
        self._writer = ThreadPoolExecutor(1, "drift")
        self._places = threading.BoundedSemaphore(_MAX_WAITING)

    def on_admit(self, request: GenerateRequest) -> SequenceObserver:
        return _AnswerObserver(self, request)

    def note(self, answer: _AnswerObserver, n_broken: int) -> None:
        """Count the values (`observe`) of an answer that has ended, unless the answer has no tokens.

        `n_broken` of the answer's tool calls could not be parsed.
        """
        finished = answer.collected.finish
        if not finished.usage.completion_tokens:
            return
        try:
            values = observe(answer.request, answer.collected, answer.logprobs, n_broken)
        except Exception:  # noqa: BLE001  the answer must succeed even if counting it fails
            _log.exception("an answer could not be counted for `edgeinfer drift`")
            return
        counts = [(name, bin_of(name, value), 1) for name, value in (values | self._constant).items()]
        counts += [(name, _SUM, n) for name, n in _sums(finished).items()]
        if self._places.acquire(blocking=False):  # if too many answers wait, this one is dropped
            with contextlib.suppress(RuntimeError):  # the interpreter exits: no thread can start
                writing = self._writer.submit(self._write, date.today(), counts)
                writing.add_done_callback(lambda _: self._places.release())

    def close(self) -> None:
        """Wait up to `_CLOSING_S` until the last counts are written. Idempotent."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            self._writer.submit(int).result(_CLOSING_S)
        self._writer.shutdown(wait=False, cancel_futures=True)

    def _write(self, day: date, counts: Sequence[tuple[str, Bin, int]]) -> None:
        """Add counts to a day; drop them if that fails. A damaged file is renamed to drift.damaged."""
        try:
            paths.make_folder(self._path.parent)
            self._path.touch(mode=0o600)
            with contextlib.closing(sqlite3.connect(self._path, timeout=_LOCKED_S)) as db, db:
                # without fsync a write takes 1 ms instead of 20 ms, but a power failure may lose counts
                db.execute("PRAGMA synchronous = OFF")
                db.execute(_TABLE)
                db.executemany(_ADD, [(f"{day}", self._model, *count) for count in counts])
                db.execute("DELETE FROM count WHERE day < ?", (f"{day - timedelta(_KEPT_DAYS)}",))
        except (OSError, sqlite3.Error) as error:
            _log.info("%s cannot be written: %s", self._path, error)
            if _is_damage(error):
                with contextlib.suppress(OSError):
                    self._path.replace(self._path.with_suffix(".damaged"))


class _AnswerObserver(SequenceObserver):
    """Collects an answer and the log probabilities of some of its tokens."""

    def __init__(self, recorder: DriftRecorder, request: GenerateRequest) -> None:
        self._recorder, self.request = recorder, request
        self.collected = CollectedAnswer()
        self.logprobs: list[float] = []
        self._n_tokens = 0
        #: Logits of the next token, and log(sum(exp(logits))); None for a token whose log probability
        #: is not recorded.
        self._next: tuple[npt.NDArray[np.float32], float] | None = None
        self._log_sum_of = LogSum()

    def on_logits(self, logits: npt.NDArray[np.float32]) -> None:
        if self._n_tokens % _LOGPROB_EVERY == 0:
            self._next = logits, self._log_sum_of(logits)

    def on_token(self, token: int) -> None:
        self._n_tokens += 1
        if self._next is not None:
            # between `on_logits` and this call, a grammar may have masked logits, but not this token's
            logits, log_sum = self._next
            self.logprobs.append(float(logits[token]) - log_sum)
            self._next = None

    def on_event(self, event: Event) -> None:
        self.collected.add(event)

    def on_end(self, last_event: Finished | EngineError, n_broken_calls: int) -> None:
        if isinstance(last_event, Finished):
            self.collected.add(last_event)
            self._recorder.note(self, n_broken_calls)


def _is_damage(error: Exception) -> bool:
    name: str = getattr(error, "sqlite_errorname", "")
    return name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))


def _sums(finished: Finished) -> dict[str, int]:
    usage, timings = finished.usage, finished.timings
    return {
        "requests": 1,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "busy_ms": round(timings.total_ms - timings.queue_ms),
        "saved_ms": round(timings.saved_ms),
    }


def observe(
    request: GenerateRequest, answer: CollectedAnswer, logprobs: Sequence[float], n_broken: int
) -> dict[str, float | str]:
    """Return the values of one generation that are counted, by name.

    They are numbers (`"ttft_ms": 81.5`), shares from 0 to 1 (`"cached_share": 0.9`) and categories
    (`"finish_reason": "stop"`). `logprobs` are those of every 16th token; `n_broken` is the number of
    tool calls that could not be parsed.
    """
    finished, turns = answer.finish, request.messages
    usage, timings = finished.usage, finished.timings
    question = next((turn.content for turn in reversed(turns) if turn.role == "user"), request.prompt)
    values: dict[str, float | str] = {
        "prompt_tokens": usage.prompt_tokens,
        "turns": len(turns),
        "system_chars": sum(len(t.content) for t in turns if t.role in ("system", "developer")),
        "kind": _request_kind(request),
        "temperature": request.sampling.temperature,
        "answer_tokens": usage.completion_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
        "answer_script": _script(answer.text),
        "finish_reason": finished.reason,
        "refusal": "yes" if _REFUSAL.search(answer.text[:_SEEN_CHARS]) else "no",
        "cached_share": usage.cached_tokens / max(1, usage.prompt_tokens),
        "queue_ms": timings.queue_ms,
        "ttft_ms": timings.ttft_ms,
    }
    if isinstance(question, str) and not request.n_pictures:
        values["prompt_chars_per_token"] = request.length / max(1, usage.prompt_tokens)
        values["prompt_script"] = _script(question)
    if request.tools:
        values["tool_calls"] = _tool_calls(request, answer, n_broken)
    if not answer.calls:
        chars = len(answer.text) + len(answer.reasoning)
        values["answer_chars_per_token"] = chars / usage.completion_tokens
    if timings.draft_tokens:
        values["draft_accepted_share"] = timings.draft_accepted_tokens / timings.draft_tokens
    if usage.completion_tokens > 1:
        values["token_ms"] = timings.decode_ms / (usage.completion_tokens - 1)
    if logprobs:
        values["negative_logprob"] = -sum(logprobs) / len(logprobs)
    return values


def _request_kind(request: GenerateRequest) -> str:
    kinds = ("pictures", request.n_pictures), ("tools", request.tools), ("schema", request.constraint)
    return next((kind for kind, has in kinds if has), "text")


def _script(text: str) -> str:
    """Return the script of most letters at a text's beginning: "latin", "cjk", … or "none"."""
    letters = (unicodedata.name(c, "other") for c in text[:_SEEN_CHARS] if c.isalpha())
    counted = Counter(name.partition(" ")[0].lower() for name in letters)
    return counted.most_common(1)[0][0] if counted else "none"


def _tool_calls(request: GenerateRequest, answer: CollectedAnswer, n_broken: int) -> str:
    """Return "valid", "none", or "broken" (a call was not parsed or lacks a required argument)."""
    required = {tool.name: tool.parameters.get("required") or () for tool in request.tools}
    for call in answer.calls.values():
        try:
            arguments = msgspec.json.decode(call.arguments, type=dict[str, object])
        except (msgspec.MsgspecError, RecursionError):
            return "broken"
        n_broken += any(str(name) not in arguments for name in required.get(call.name, ()))
    if n_broken:
        return "broken"
    return "valid" if answer.calls else "none"


def bin_of(aggregate: str, value: float | str) -> Bin:
    """Return the bin of the histogram in which a value is counted; `aggregate` is the value's name.

    A category is its own bin. Shares (names with the end `_share`) have 20 bins of equal width; other
    numbers have four bins per doubling.
    """
    if isinstance(value, str):
        return value
    if aggregate.endswith("_share"):
        return int(value * SHARE_BINS)
    return math.floor(BINS_PER_DOUBLING * math.log2(min(_MAX, max(_MIN, value))))


def read_week(path: Path, last: date) -> dict[str, Counts]:
    """Read the counts of the seven days that end with `last`, by model; {} if there is no file.

    Raises StoreError if the file cannot be read.
    """
    models: dict[str, Counts] = {}
    for day, model, aggregate, bin, n in _read(path, last - timedelta(6), last):
        if bin != _SUM:
            models.setdefault(model, {}).setdefault(aggregate, {}).setdefault(day, Counter())[bin] = n
    return models


class DayOfUse(msgspec.Struct, frozen=True, kw_only=True):
    """Usage of a model on one day (`2026-11-30`).

    `busy_ms` is the time of prefill and decoding; `saved_ms` is the estimated time that the prefill of
    the cached tokens would have taken.
    """

    day: str
    model: str
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    busy_ms: int = 0
    saved_ms: int = 0


def read_usage(path: Path, first: date, last: date) -> tuple[DayOfUse, ...]:
    """Read each model's usage on each day from `first` to `last`; () if there is no file.

    Raises StoreError if the file cannot be read.
    """
    days: dict[tuple[str, str], dict[str, Any]] = {}
    for day, model, name, bin, n in _read(path, first, last):
        if bin == _SUM:
            days.setdefault((day, model), {"day": day, "model": model})[name] = n
    return msgspec.convert(tuple(days.values()), tuple[DayOfUse, ...])


def _read(path: Path, first: date, last: date) -> list[Any]:
    if not path.exists():
        return []
    query = "SELECT * FROM count WHERE day BETWEEN ? AND ? ORDER BY day, model"
    try:
        with contextlib.closing(sqlite3.connect(path)) as db:
            return db.execute(query, (f"{first}", f"{last}")).fetchall()
    except sqlite3.Error as error:
        hint = f"remove {path} to count anew" if _is_damage(error) else "try again in a moment"
        raise StoreError(f"the counts in {path} cannot be read: {error}", hint=hint) from error
