"""Measure OpenAI-compatible servers, ours and others, with the tests of llama-bench.

`pp512`: uncached prompt tokens, divided by the time to the first token. `tg128`: answer tokens after
the first, divided by the time from the first to the last. `tg128 x4`: the same for four concurrent
streams together, from the earliest first token to the latest last token. `turn`: time to the first
token of a prompt whose last words are new and whose other words are cached. `@d4096`: the prompt
begins with this many cached tokens.

The client shares the processors with the measured server. So while an answer arrives, the client only
records times and looks for the end of the answer; it parses the data afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import itertools
import random
import socket
import ssl
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httptools
import msgspec

from edgeinfer.errors import ServeError
from edgeinfer.platform.energy import EnergyMeter
from edgeinfer.safe_text import without_controls

#: Limits of one answer: maximum size (bytes) of the response, and maximum time (s) to read it.
_MOST_BYTES, _MOST_S = 64 << 20, 1800.0
_READ_BYTES, _CONNECT_S = 64 << 10, 10.0
_CHARACTERS_OF_ERROR = 300
#: Maximum number of concurrent answers. A thread reads each answer.
MOST_STREAMS = 256
_STREAMS = ThreadPoolExecutor(MOST_STREAMS, "stream")


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server to measure: its URL (`http://host:port`), the model, and the API key ("" for none)."""

    url: str
    model: str = ""
    key: str = ""

    @property
    def is_here(self) -> bool:
        """Return whether the server runs on this machine."""
        return urlsplit(self.url).hostname in ("127.0.0.1", "localhost", "::1")

    @property
    def label(self) -> str:
        """Address and model: `127.0.0.1:8080 qwen3-4b`."""
        return f"{urlsplit(self.url).netloc} {self.model}".strip()


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A streamed answer. `arrivals` are the times (s) from the request to each event with text.

    `total_s` is the time to the end. `cached_tokens` is None if the server does not report them.
    """

    arrivals: tuple[float, ...]
    total_s: float
    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0]

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.arrivals)]


class _Body:
    """A response's body as (arrival time in s, bytes) pairs. httptools calls the `on_` methods."""

    def __init__(self) -> None:
        self.pieces: list[tuple[float, bytes]] = []
        self.elapsed_s, self.is_complete = 0.0, False

    def on_body(self, data: bytes) -> None:
        self.pieces.append((self.elapsed_s, data))

    def on_message_complete(self) -> None:
        self.is_complete = True


def _connect(url: SplitResult) -> socket.socket:
    secure = url.scheme == "https"
    host, port = url.hostname or "", url.port or (443 if secure else 80)
    connection = socket.create_connection((host, port), timeout=_CONNECT_S)
    if secure:
        connection = ssl.create_default_context().wrap_socket(connection, server_hostname=host)
    return connection


def _exchange(
    connection: socket.socket, request: bytes, began: float
) -> tuple[int, list[tuple[float, bytes]]]:
    """Send a request; return the HTTP status, and each line of the response with its arrival time.

    The time is in seconds after `began`. Reads block their thread: an event loop made a server that
    decodes on the same processors 2 % slower.
    """
    body, size = _Body(), 0
    parser = httptools.HttpResponseParser(body)
    connection.sendall(request)
    try:
        while not body.is_complete and size <= _MOST_BYTES:
            connection.settimeout(max(_MOST_S - body.elapsed_s, 0.001))
            if not (data := connection.recv(_READ_BYTES)):
                break
            body.elapsed_s = time.perf_counter() - began
            size += len(data)
            parser.feed_data(data)
    except ConnectionError:
        if not body.pieces:
            raise
    lines, remainder = [], b""
    for offset_s, piece in body.pieces:
        *whole, remainder = (remainder + piece).split(b"\n")
        lines += [(offset_s, line) for line in whole]
    lines.append((time.perf_counter() - began, remainder))
    return parser.get_status_code(), lines


async def _post(target: Target, path: str, body: Any) -> tuple[int, list[tuple[float, bytes]]]:
    url = urlsplit(target.url)
    content = msgspec.json.encode(body)
    head = [
        f"POST {url.path.rstrip('/')}{path} HTTP/1.1",
        f"host: {url.netloc}",
        "connection: close",
        "content-type: application/json",
        f"content-length: {len(content)}",
        *([f"authorization: Bearer {target.key}"] if target.key else []),
    ]
    request = "\r\n".join([*head, "", ""]).encode() + content
    began = time.perf_counter()
    in_thread = functools.partial(asyncio.get_running_loop().run_in_executor, _STREAMS)
    try:
        with await in_thread(_connect, url) as connection:
            try:
                return await in_thread(_exchange, connection, request, began)
            # If this task is cancelled, its thread reads on until the connection is shut down.
            # `SSLSocket.shutdown` is not called, because it turns the encryption off.
            finally:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except (OSError, httptools.HttpParserError, httptools.HttpParserUpgrade, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ServeError(f"{target.url} does not answer: {reason}") from error


async def ask(target: Target, path: str, body: dict[str, Any]) -> Answer:
    """Request one answer, as a stream, with the JSON fields `body` at the URL's `path`.

    Raises ServeError if the server does not answer, answers with a status other than 200, or streams no
    text or no token counts.
    """
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    model = {"model": target.model} if target.model else {}
    status, lines = await _post(target, path, fields | model | body)
    if status != 200:
        said = b" ".join(line for _, line in lines).decode(errors="replace")
        text = without_controls(said)[:_CHARACTERS_OF_ERROR]
        hint = "check the address, its model (`URL#MODEL`) and the API key"
        raise ServeError(f"{target.url}{path} answered {status}: {text}", hint=hint)
    arrivals: list[float] = []
    usage: dict[str, Any] = {}
    try:
        for offset_s, line in lines:
            if line.startswith(b"data:") and not line.endswith((b"[DONE]", b"[DONE]\r")):
                event = msgspec.json.decode(line[5:])
                usage = event.get("usage") or usage
                arrivals += [offset_s for choice in event.get("choices") or () if _has_text(choice)]
        tokens = usage["prompt_tokens"], usage["completion_tokens"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if not arrivals:
            raise ValueError("no text")
        return Answer(
            arrivals=tuple(arrivals),
            total_s=lines[-1][0],
            prompt_tokens=int(tokens[0]),
            completion_tokens=int(tokens[1]),
            cached_tokens=None if cached is None else int(cached),
        )
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
        problem = f"{target.url}{path} streams no text, or no token counts (`usage`)"
        raise ServeError(problem, hint="measure a server that streams both") from error


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or choice
    return any(delta.get(name) for name in ("text", "content", "reasoning_content", "reasoning"))


#: Words that are one token in most vocabularies.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government number "
    "night point home water room mother area money story fact month lot right study book eye job word "
    "business issue side kind head house service friend father power hour game line end member law "
    "car city community name "
).split()
#: End of a prompt to which any chat model answers with more tokens than are measured.
_LONG = ". Now count from one to ten thousand in words: one, two, three, four, five, six,"
_TURN = ". And what is more:"
#: Request fields that llama.cpp and edgeinfer have. A server that refuses them gets requests without
#: them.
_FIELDS: dict[str, Any] = {"ignore_eos": True, "speculative": "off"}
_FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", _FIELDS),
    ("/v1/completions", {}),
    ("/v1/chat/completions", {}),
)
#: Data that `noise_ms` hashes, to measure how busy the machine is.
_NOISE = bytes(16 << 20)
_FEW, _MORE = 32, 160


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The tests to run, and the number of rounds. 0 for `pp` or `tg` skips that test.

    `pp`, `tg` and `depths` are tokens of prompt, answer and cached prefix; `streams` are concurrent
    answers.
    """

    pp: int = 512
    tg: int = 128
    depths: tuple[int, ...] = (0,)
    streams: tuple[int, ...] = (1,)
    rounds: int = 5


class Sample(msgspec.Struct, frozen=True):
    """One measurement, in tokens/s or ms; `joules` is the energy per token, None if unknown."""

    value: float
    unit: str
    joules: float | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one server (`side`) in one `test`, such as `pp512`.

    `joules_per_token` is None if unknown. `beside` is the median of each round's ratio to the first
    server; None for that server itself.
    """

    side: str
    test: str
    unit: str
    median: float
    least: float
    greatest: float
    samples: tuple[float, ...]
    joules_per_token: float | None = None
    beside: float | None = None


class MeasuredServer:
    """A server to measure, and its properties, which `prepare` finds out.

    Requests have `key` as `prompt_cache_key`. By this key, the caller can later delete the prefixes
    that the server has cached.
    """

    def __init__(self, name: str, target: Target, key: str, meter: EnergyMeter | None = None) -> None:
        self.name, self.target = name, target
        self.key = key
        self._meter = meter if meter is not None and target.is_here else None
        self._path, self._fields = _FORMS[0]
        self._words_per_token, self._fixed_tokens = 1.0, 0.0
        # use other prompts for each server, because edgeinfer's endpoints share a prefix cache on disk
        self._random = random.Random(f"{key} {name}")
        self.notes: set[str] = set()
        self.last_prompt = self.last_turn = ""

    async def prepare(self) -> None:
        """Find out which path and fields the server accepts, and how many tokens a word has.

        Later requests use the results. Raises ServeError if the server accepts no known form.
        """
        failure: ServeError | None = None
        for self._path, self._fields in _FORMS:
            try:
                few = await self.ask(self._text(_FEW), 1)
                more = await self.ask(self._text(_MORE), 1)
            except ServeError as error:
                failure = failure or error
                continue
            per_word = max(more.prompt_tokens - few.prompt_tokens, 1) / (_MORE - _FEW)
            self._words_per_token = 1 / per_word
            self._fixed_tokens = max(0.0, few.prompt_tokens - _FEW * per_word)
            return
        raise failure or ServeError("")

    def _text(self, n_words: int) -> str:
        return " ".join(self._random.choices(_WORDS, k=max(1, n_words)))

    def prompt(self, tokens: int, *, append_to: str = "") -> str:
        """Return a random text of about `tokens` tokens, appended to `append_to`."""
        if not tokens:
            return append_to
        fixed = 0.0 if append_to else self._fixed_tokens
        text = self._text(round((tokens - fixed) * self._words_per_token))
        return f"{append_to} {text}".lstrip()

    async def ask(self, prompt: str, n: int) -> Answer:
        """Request a greedy answer of `n` tokens. Raises ServeError."""
        messages = [{"role": "user", "content": prompt}]
        content = {"prompt": prompt} if self._path == "/v1/completions" else {"messages": messages}
        fields = self._fields | ({"prompt_cache_key": self.key} if self._fields else {})
        body = content | {"max_tokens": n, "temperature": 0} | fields
        return await ask(self.target, self._path, body)

    async def measure(self, *asked: tuple[str, int]) -> tuple[list[Answer], float | None]:
        """Request answers to (prompt, number of answer tokens) pairs at the same time.

        Returns the answers, and the energy (J) that the machine used meanwhile; None if unknown.
        """
        if self._meter:
            self._meter.read_joules()
        answers = await asyncio.gather(*(self.ask(prompt, n) for prompt, n in asked))
        return answers, self._meter.read_joules() if self._meter else None

    async def round(self, plan: Plan) -> dict[str, Sample]:
        """Run every test of `plan` once; return the results by test (`pp512`). Raises ServeError."""
        samples: dict[str, Sample] = {}
        for depth in plan.depths:
            depth_suffix = f" @d{depth}" if depth else ""
            prefix = self.prompt(depth)
            before = (await self.ask(prefix, 1)).prompt_tokens if depth else 0
            if plan.tg:
                decode = await self._decode([f"{prefix}{_LONG}"], plan.tg)
                samples[f"tg{plan.tg}{depth_suffix}"] = decode
            if plan.pp:
                self.last_prompt = self.prompt(plan.pp, append_to=prefix)
                [answer], joules = await self.measure((self.last_prompt, 1))
                cached = answer.cached_tokens
                if depth and cached is None:
                    self.notes.add(f"{self.name} reports no cached tokens; @d assumes a cached prefix")
                n = answer.prompt_tokens - (before if cached is None else cached)
                samples[f"pp{plan.pp}{depth_suffix}"] = _rate(n, answer.ttft_s, joules)
                self.last_turn = f"turn {plan.pp + depth}"
                samples[self.last_turn] = await self.turn()
        for width in plan.streams:
            if width > 1 and plan.tg:
                prompts = [f"{self.prompt(16)}{_LONG}" for _ in range(width)]
                samples[f"tg{plan.tg} x{width}"] = await self._decode(prompts, plan.tg)
        return samples

    async def turn(self) -> Sample:
        """Measure the time (ms) to the first token of a chat's next turn.

        Its prompt is `last_prompt`, which the server has cached, and a few more words.
        """
        answer = await self.ask(self.last_prompt + _TURN, 1)
        return Sample(answer.ttft_s * 1000, "ms")

    async def _decode(self, prompts: Sequence[str], n: int) -> Sample:
        answers, joules = await self.measure(*((prompt, n + 1) for prompt in prompts))
        n_tokens = sum(answer.completion_tokens - 1 for answer in answers)
        if n_tokens < n * len(prompts):
            self.notes.add(f"{self.name}: answers ended before {n} tokens (no ignore_eos?)")
        first, last = min(a.ttft_s for a in answers), max(a.arrivals[-1] for a in answers)
        if first == last:
            self.notes.add(f"{self.name} sent answers in one piece: tg includes the prefill")
        return _rate(n_tokens, last - first or last, joules)


def _rate(tokens: int, seconds: float, joules: float | None) -> Sample:
    if tokens < 1 or seconds <= 0:
        problem = f"{tokens} tokens in {seconds:g} s give no rate"
        raise ServeError(problem, hint="use longer prompts and answers, e.g. `-p 512 -n 128`")
    return Sample(tokens / seconds, "tokens/s", None if joules is None else joules / tokens)


def noise_ms() -> float:
    """Return the time (ms) of hashing 16 MiB, which shows how busy the machine is."""
    began = time.perf_counter()
    hashlib.sha256(_NOISE).digest()
    return (time.perf_counter() - began) * 1000


async def measure(
    sides: Sequence[MeasuredServer], plan: Plan, report: Callable[[str, float | None], None]
) -> tuple[list[dict[str, dict[str, Sample]]], list[float]]:
    """Measure the servers in `plan.rounds` rounds; every second round has the reverse order.

    `report` is called with a text for the progress display. Returns the samples of each round (server →
    test → sample), and the `noise_ms` before each turn of a server. Raises ServeError.
    """
    for side in sides:
        report(f"asking {side.name}", None)
        await side.prepare()
    rounds, noise = [], []
    for number in range(plan.rounds):
        samples: dict[str, dict[str, Sample]] = {}
        for side in list(sides)[:: -1 if number % 2 else 1]:
            report(f"round {number + 1} of {plan.rounds}: {side.name}", None)
            noise.append(noise_ms())
            samples[side.name] = await side.round(plan)
        rounds.append(samples)
    return rounds, noise


def rows(rounds: Sequence[dict[str, dict[str, Sample]]], sides: Sequence[str]) -> list[Row]:
    """Summarize the rounds of `measure`: a row for each test of each of the servers named `sides`."""
    tests = dict.fromkeys(test for samples in rounds for side in sides for test in samples[side])
    result = []
    for test, side in itertools.product(tests, sides):
        pairs = [(of_round[side].get(test), of_round[sides[0]].get(test)) for of_round in rounds]
        samples = [sample for sample, _ in pairs if sample]
        if not samples:
            continue
        values = [sample.value for sample in samples]
        joules = [sample.joules for sample in samples if sample.joules is not None]
        ratios = [sample.value / first.value for sample, first in pairs if sample and first]
        row = Row(
            side=side,
            test=test,
            unit=samples[0].unit,
            median=statistics.median(values),
            least=min(values),
            greatest=max(values),
            samples=tuple(values),
            joules_per_token=statistics.median(joules) if joules else None,
            beside=statistics.median(ratios) if ratios and side != sides[0] else None,
        )
        result.append(row)
    return result


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    every = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in every)
