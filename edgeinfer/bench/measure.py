"""What is measured of each server, in llama-bench's terms, and how: rounds in turn, by one client.

`pp512`: tokens of a prompt, without the cached ones, over the time to the first token. `tg128`: tokens
after the first over the time after the first. `tg128 x4`: four streams at once, all their tokens after
the first over the time from the first of them to the last. `turn`: the time to the first token where
all of the prompt but its last words is cached. `@d4096`: behind so many tokens, which are cached.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from edgeinfer.bench.client import Answer, Target, ask
from edgeinfer.errors import ServeError
from edgeinfer.platform.energy import EnergyMeter

#: One token each in most vocabularies.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government number "
    "night point home water room mother area money story fact month lot right study book eye job word "
    "business issue side kind head house service friend father power hour game line end member law "
    "car city community name "
).split()
#: Whatever can be asked to, then counts for longer than any measurement.
_LONG = ". Now count from one to ten thousand in words: one, two, three, four, five, six,"
_TURN = ". And what is more:"
#: What servers are asked, the first that they take: with fields of llama.cpp's and ours, or without.
_FIELDS: dict[str, Any] = {"ignore_eos": True, "speculative": "off"}
_FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", _FIELDS),
    ("/v1/completions", {}),
    ("/v1/chat/completions", {}),
)
#: Of the fixed work between measurements, bytes.
_NOISE = bytes(16 << 20)
_FEW, _MORE = 32, 160


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths (tokens), numbers of streams, and rounds. `pp` or `tg` 0 leaves that test out."""

    pp: int = 512
    tg: int = 128
    depths: tuple[int, ...] = (0,)
    streams: tuple[int, ...] = (1,)
    rounds: int = 5


class Sample(msgspec.Struct, frozen=True):
    """A figure of one round, in tokens/s or ms, and its energy (J per token) if the machine tells."""

    value: float
    unit: str
    joules: float | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A test of one server. `beside`: the median of the rounds' ratios to the first server's."""

    side: str
    test: str
    unit: str
    median: float
    least: float
    greatest: float
    samples: tuple[float, ...]
    joules_per_token: float | None = None
    beside: float | None = None


class Side:
    """A server that is measured. `key` owns the cached prefixes of its requests."""

    def __init__(self, name: str, target: Target, key: str, meter: EnergyMeter | None = None) -> None:
        self.name, self.target = name, target
        self.key = key
        self._meter = meter if meter is not None and target.is_here else None
        self._path, self._fields = _FORMS[0]
        self._words_per_token, self._fixed_tokens = 1.0, 0.0
        self._random = random.Random(f"{key} {name}")  # ours share a cache on disk
        self.notes: set[str] = set()
        self.last_prompt = self.last_turn = ""

    async def prepare(self) -> None:
        """Find a form that it takes, and count its tokens. Raises ServeError."""
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

    def _text(self, words: int) -> str:
        return " ".join(self._random.choices(_WORDS, k=max(1, words)))

    def prompt(self, tokens: int, *, behind: str = "") -> str:
        """Make a text of about so many tokens that is no prefix of another, or put it behind one."""
        if not tokens:
            return behind
        fixed = 0.0 if behind else self._fixed_tokens
        text = self._text(round((tokens - fixed) * self._words_per_token))
        return f"{behind} {text}".lstrip()

    async def ask(self, prompt: str, n: int) -> Answer:
        """Ask for `n` tokens, greedily. Raises ServeError."""
        messages = [{"role": "user", "content": prompt}]
        content = {"prompt": prompt} if self._path == "/v1/completions" else {"messages": messages}
        fields = self._fields | ({"prompt_cache_key": self.key} if self._fields else {})
        body = content | {"max_tokens": n, "temperature": 0} | fields
        return await ask(self.target, self._path, body)

    async def measured(self, *asked: tuple[str, int]) -> tuple[list[Answer], float | None]:
        """Ask all at once; the answers, and the joules of the meantime."""
        if self._meter:
            self._meter.used()
        answers = await asyncio.gather(*(self.ask(prompt, n) for prompt, n in asked))
        return answers, self._meter.used() if self._meter else None

    async def round(self, plan: Plan) -> dict[str, Sample]:
        """Measure every test once. Raises ServeError."""
        found: dict[str, Sample] = {}
        for depth in plan.depths:
            at = f" @d{depth}" if depth else ""
            behind = self.prompt(depth)
            before = (await self.ask(behind, 1)).prompt_tokens if depth else 0
            if plan.tg:
                found[f"tg{plan.tg}{at}"] = await self._decode([f"{behind}{_LONG}"], plan.tg)
            if plan.pp:
                self.last_prompt = self.prompt(plan.pp, behind=behind)
                [answer], joules = await self.measured((self.last_prompt, 1))
                cached = answer.cached_tokens
                if depth and cached is None:
                    self.notes.add(f"{self.name} does not tell cached tokens: @d counts all as cached")
                n = answer.prompt_tokens - (before if cached is None else cached)
                found[f"pp{plan.pp}{at}"] = _rate(n, answer.ttft_s, joules)
                self.last_turn = f"turn {plan.pp + depth}"
                found[self.last_turn] = await self.turn()
        for width in plan.streams:
            if width > 1 and plan.tg:
                prompts = [f"{self.prompt(16)}{_LONG}" for _ in range(width)]
                found[f"tg{plan.tg} x{width}"] = await self._decode(prompts, plan.tg)
        return found

    async def turn(self) -> Sample:
        """Continue the last prompt, which is cached."""
        answer = await self.ask(self.last_prompt + _TURN, 1)
        return Sample(answer.ttft_s * 1000, "ms")

    async def _decode(self, prompts: Sequence[str], n: int) -> Sample:
        answers, joules = await self.measured(*((prompt, n + 1) for prompt in prompts))
        made = sum(answer.completion_tokens - 1 for answer in answers)
        if made < n * len(prompts):
            self.notes.add(f"{self.name}: answers ended before {n} tokens (it may not know ignore_eos)")
        first, last = min(a.ttft_s for a in answers), max(a.arrivals[-1] for a in answers)
        if first == last:
            self.notes.add(f"{self.name} sent answers in one piece: tg is with their prefill")
        return _rate(made, last - first or last, joules)


def _rate(tokens: int, seconds: float, joules: float | None) -> Sample:
    if tokens < 1 or seconds <= 0:
        raise ServeError("an answer was too short to be measured", hint="ask for more tokens: -p, -n")
    return Sample(tokens / seconds, "tokens/s", None if joules is None else joules / tokens)


def noise_ms() -> float:
    """Return how long (ms) a fixed work takes now."""
    began = time.perf_counter()
    hashlib.sha256(_NOISE).digest()
    return (time.perf_counter() - began) * 1000


async def measure(
    sides: Sequence[Side], plan: Plan, report: Callable[[str, float | None], None]
) -> tuple[list[dict[str, dict[str, Sample]]], list[float]]:
    """Measure the sides in turn, each second round backwards; the rounds, and times of the fixed work.

    Raises ServeError.
    """
    for side in sides:
        report(f"asking {side.name}", None)
        await side.prepare()
    rounds, noise = [], []
    for number in range(plan.rounds):
        found: dict[str, dict[str, Sample]] = {}
        for side in list(sides)[:: -1 if number % 2 else 1]:
            report(f"round {number + 1} of {plan.rounds}: {side.name}", None)
            noise.append(noise_ms())
            found[side.name] = await side.round(plan)
        rounds.append(found)
    return rounds, noise


def rows(rounds: Sequence[dict[str, dict[str, Sample]]], sides: Sequence[str]) -> list[Row]:
    """Summarize the rounds: a row for each test and side."""
    tests = dict.fromkeys(test for one in rounds for side in sides for test in one[side])
    made = []
    for test, side in itertools.product(tests, sides):
        samples = [one[side][test] for one in rounds if test in one[side]]
        if not samples:
            continue
        values = [sample.value for sample in samples]
        joules = [sample.joules for sample in samples if sample.joules is not None]
        both = [one for one in rounds if test in one[side] and test in one[sides[0]]]
        ratios = [one[side][test].value / one[sides[0]][test].value for one in both]
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
        made.append(row)
    return made


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Format a table in Markdown."""
    every = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in every)
