"""A scripted engine for tests of the front ends: the real interface, no model, no llama.cpp.

A script is what one generation does: events, errors, `Delay` and `StepGate`. The fake checks requests
as the engine does, ends a cancelled generation where it stands, leaves out the reasoning beyond a
request's budget, and counts.

    engine = FakeEngine([["Hel", "lo"], [TextDelta("a"), StepGate(event), DecodeError("broken")]])
"""

from __future__ import annotations

import hashlib
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from edgeinfer.config.config_file import Config
from edgeinfer.errors import (
    ContextLengthError,
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    QueueFullError,
)
from edgeinfer.host import EngineHost, LoadProgress
from edgeinfer.models.reference import ModelRef
from edgeinfer.runtime.event_stream import EventStream
from edgeinfer.runtime.events import (
    Divergence,
    Event,
    Finished,
    FinishReason,
    Progress,
    ReasoningDelta,
    TextDelta,
    Timings,
    ToolCallDelta,
    Usage,
)
from edgeinfer.runtime.options import Adapter, EngineInfo, EngineMetrics, LoadOptions, ModelFiles
from edgeinfer.runtime.requests import GenerateRequest, check_request, check_tools

_N_VOCAB = 256
_N_EMBD = 8


@dataclass(frozen=True)
class Delay:
    """Wait so many seconds, or until cancelled."""

    seconds: float


@dataclass(frozen=True)
class StepGate:
    """Wait for the event or a cancellation; `reached` is set on arrival here."""

    opened: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)


Item = str | Event | EngineError | Delay | StepGate
Script = Sequence[Item]

DEFAULT_SCRIPT: Script = ("Hello", " world")
DEFAULT_INFO = EngineInfo(
    model="fake",
    architecture="fake",
    n_vocab=_N_VOCAB,
    n_ctx=4096,
    n_ctx_train=4096,
    n_parallel=4,
    n_embd=_N_EMBD,
    chat_template="{{ messages }}",
    can_embed=True,
    can_rerank=True,
    tool_format="fake",
)


def split_script(script: Script, dice: random.Random, *, pause_s: float = 0.0) -> Script:
    """Deliver a script's text, reasoning and arguments in other pieces, with pauses between them.

    The pieces: single characters, of random sizes, or the blanks at a beginning first. A pause
    longer than a front end's look at the answer makes it see the pieces one by one.
    """
    sizes = dice.choice([(1, 1), (1, 3), (1, 20), (5, 60)])
    items: list[Item] = []
    for item in script:
        event = TextDelta(item) if isinstance(item, str) else item
        name = "arguments" if isinstance(event, ToolCallDelta) else "text"
        text = getattr(event, name, "")
        if not isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta) or not text:
            items.append(event)
            continue
        cut = len(text) - len(text.lstrip()) if dice.random() < 0.5 else 0
        pieces = [text[:cut]] if cut else []
        while cut < len(text):
            size = dice.randint(*sizes)
            pieces.append(text[cut : cut + size])
            cut += size
        for number, piece in enumerate(pieces):
            changes = {name: piece}
            if number and name == "arguments":
                changes |= {"id": "", "name": ""}
            items.append(replace(event, **changes))
            if pause_s and dice.random() < 0.3:
                items.append(Delay(dice.uniform(0, 2 * pause_s)))
    return items


class FakeEngine:
    """Play `scripts`: one per request in order, the last again; or a function of the request.

    `requests` are those submitted, `read` the prefill-only ones (`max_tokens` 0), which play `prefill`. `max_inside` requests
    may run at once; beyond it QueueFullError.
    """

    def __init__(
        self,
        scripts: Iterable[Script] | Callable[[GenerateRequest], Script] = (),
        *,
        info: EngineInfo = DEFAULT_INFO,
        max_inside: int = 1000,
        prefill: Script = (),
    ) -> None:
        self._choose = scripts if callable(scripts) else _in_order(scripts)
        self._info, self._max_inside = info, max_inside
        self._prefill = prefill
        self._lock = threading.Lock()
        self._players: set[_Player] = set()
        self._closed = False
        self._totals = Counter[str]()
        self.n_threads = 0
        self.vision_error = ""
        self.requests: list[GenerateRequest] = []
        self.read: list[GenerateRequest] = []

    @property
    def is_open(self) -> bool:
        """Return whether `close` was not called yet."""
        return not self._closed

    def health(self) -> str:
        """See `Engine.health`."""
        return ""

    @property
    def info(self) -> EngineInfo:
        return self._info

    def submit(self, request: GenerateRequest) -> EventStream:
        """Check, choose a script and play it in a thread of its own."""
        check_request(request, _N_VOCAB)
        self._check_chat(request)
        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine is closed")
            if len(self._players) >= self._max_inside:
                raise QueueFullError(f"the queue is full: {len(self._players)} requests run or wait")
            if request.max_tokens == 0:
                self.read.append(request)
                script = self._prefill
            else:
                self.requests.append(request)
                script = self._choose(request)
            player = _Player(script, request, self._prompt_tokens(request), self._forget_player)
            self._players.add(player)
            self._totals["requests_total"] += 1
            self._totals["prompt_tokens_total"] += player.prompt_tokens
            player.start()
        return player.stream

    def _prompt_tokens(self, request: GenerateRequest) -> int:
        if request.messages:
            return len(self.tokenize_chat(request))
        if request.infill is not None:
            return len(self.tokenize(request.infill.prefix + request.infill.suffix)) + 3
        prompt = request.prompt or ()
        return max(1, len(prompt.encode() if isinstance(prompt, str) else prompt))

    def _forget_player(self, player: _Player) -> None:
        with self._lock:
            self._players.discard(player)
            self._totals["completion_tokens_total"] += player.n_tokens
            self._totals["cancelled_total"] += player.cancelled.is_set()

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = False
    ) -> list[int]:
        """Return one token for each byte."""
        return list(text.encode())

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        if any(not 0 <= t < _N_VOCAB for t in tokens):
            raise InvalidRequestError("a token is not in the vocabulary", param="tokens")
        return bytes(tokens)

    def apply_template(self, request: GenerateRequest) -> str:
        """Write `role: content` lines, after the names of tools and options."""
        tools, options = request.tools, request.template_options
        head = f"tools: {', '.join(t.name for t in tools)}\n" if tools else ""
        head += f"options: {', '.join(options)}\n" if options else ""
        return head + "".join(f"{m.role}: {m.content}\n" for m in request.messages) + "assistant:"

    def tokenize_chat(self, request: GenerateRequest) -> list[int]:
        self._check_chat(request)
        return self.tokenize(self.apply_template(request))

    def _check_chat(self, request: GenerateRequest) -> None:
        check_tools(request)
        if request.n_pictures and not self._info.can_see:
            message = f"{self._info.model} does not accept pictures{self.vision_error}"
            raise InvalidRequestError(message, param="messages")

    def embed(self, texts: Sequence[str | Sequence[int]]) -> list[list[float]]:
        """Return a unit vector from a hash of each text."""
        raw = (t.encode() if isinstance(t, str) else bytes(token % 256 for token in t) for t in texts)
        return list(map(_vector, raw))

    def rerank(self, query: str, documents: Sequence[str]) -> list[float]:
        """Return the share of the query's words that each document has."""
        query_terms = set(query.lower().split())
        return [len(query_terms & set(d.lower().split())) / max(1, len(query_terms)) for d in documents]

    def agent_prefix(self, agent: str, salt: str = "") -> list[int]:
        """Return no tokens: no preamble is cached."""
        return []

    def use_adapters(self, adapters: Sequence[Adapter]) -> tuple[Adapter, ...]:
        """Replace the adapters, without reading files."""
        self._info = replace(self._info, lora=tuple(adapters))
        return self._info.lora

    def metrics(self) -> EngineMetrics:
        with self._lock:
            now = EngineMetrics(running=len(self._players), kv_total_tokens=self._info.n_ctx)
            return replace(now, **self._totals)

    def use_threads(self, n_threads: int) -> None:
        """Note the threads in `n_threads`; nothing is computed."""
        self.n_threads = n_threads

    def close(self) -> None:
        """Cancel everything and wait for it. Idempotent."""
        with self._lock:
            self._closed = True
            players = list(self._players)
        for player in players:
            player.stream.cancel()
        for player in players:
            player.join()


class SmallEngine(FakeEngine):
    """Refuses prompts of more than `longest` characters, which is also its context."""

    def __init__(
        self, scripts: Iterable[Script] | Callable[[GenerateRequest], Script] = (), *, longest: int
    ) -> None:
        super().__init__(scripts, info=replace(DEFAULT_INFO, n_ctx=longest))
        self._longest = longest

    def submit(self, request: GenerateRequest) -> EventStream:
        size = sum(len(m.content) for m in request.messages)
        if size > self._longest:
            raise ContextLengthError(f"the prompt of {size} tokens does not fit", param="messages")
        return super().submit(request)


class StuckEngine(FakeEngine):
    """Prepares a request "slow", and tokenizes that text, only once `opened` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()
        self.inside = threading.Semaphore(0)

    def submit(self, request: GenerateRequest) -> EventStream:
        self._wait(request.messages[-1].content if request.messages else "")
        return super().submit(request)

    def tokenize(self, text: str, **options: bool) -> list[int]:
        self._wait(text)
        return super().tokenize(text, **options)

    def _wait(self, text: str) -> None:
        if text == "slow":
            self.inside.release()
            assert self.opened.wait(60)


class FakeHost(EngineHost):
    """Gives out the scripted engine that `load` returns for a model's name."""

    def __init__(self, load: Callable[[str], FakeEngine]) -> None:
        super().__init__(config=Config(default_model="fake"))
        self._load_fake = load

    def files(
        self, model: str | ModelRef, progress: LoadProgress | None = None, *, draft: str = ""
    ) -> ModelFiles:
        return ModelFiles(name=model if isinstance(model, str) else model.text, paths=())

    def engine(
        self, model: str | ModelRef, options: LoadOptions, progress: LoadProgress | None = None
    ) -> FakeEngine:
        return self._load_fake(model if isinstance(model, str) else model.text)


class _Player(threading.Thread):
    def __init__(
        self,
        script: Script,
        request: GenerateRequest,
        prompt_tokens: int,
        on_end: Callable[[_Player], None],
    ) -> None:
        super().__init__(name="fake-generation", daemon=True)
        self._script = list(script)
        self._request = request
        self._on_end = on_end
        self._began = time.monotonic()
        self._first_ms = 0.0
        self.prompt_tokens, self.n_tokens = prompt_tokens, 0
        self.n_reasoning = 0
        self.cancelled = threading.Event()
        self.stream = EventStream(self.cancelled.set)

    def run(self) -> None:
        last_event: Event | EngineError | None = None
        self.stream.put(Progress(self.prompt_tokens, self.prompt_tokens))
        for item in self._script:
            if last_event := self._ending(item):
                break
            self._play(item)
        if last_event is None:
            last_event = self._make_finished("cancelled" if self.cancelled.is_set() else "stop")
        self._on_end(self)
        self.stream.put(last_event)

    def _ending(self, item: Item) -> Event | EngineError | None:
        if isinstance(item, EngineError | Finished):
            return item
        if self.cancelled.is_set():
            return self._make_finished("cancelled")
        deadline_s, max_tokens = self._request.deadline_s, self._request.max_tokens
        if deadline_s is not None and self._elapsed_ms() >= 1000.0 * deadline_s:
            return self._make_finished("deadline")
        is_full = bool(max_tokens) and self.n_tokens >= max_tokens
        return self._make_finished("length") if is_full else None

    def _play(self, item: Item) -> None:
        if isinstance(item, Delay):
            self.cancelled.wait(item.seconds)
        elif isinstance(item, StepGate):
            item.reached.set()
            while not (item.opened.wait(0.005) or self.cancelled.is_set()):
                pass
        elif not isinstance(item, EngineError):
            event = TextDelta(item) if isinstance(item, str) else item
            if isinstance(event, ReasoningDelta):
                if self.n_reasoning == self._request.reasoning_budget:
                    return
                self.n_reasoning += 1
            self.n_tokens += isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta)
            self._first_ms = self._first_ms or self._elapsed_ms()
            self.stream.put(event)

    def _elapsed_ms(self) -> float:
        return (time.monotonic() - self._began) * 1000.0

    def _make_finished(self, reason: FinishReason) -> Finished:
        usage = Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.n_tokens,
            reasoning_tokens=self.n_reasoning,
        )
        decode_ms = max(0.0, self._elapsed_ms() - self._first_ms)
        timings = Timings(ttft_ms=self._first_ms, decode_ms=decode_ms)
        divergence = Divergence(cause="nothing" if self._request.cache_prompt else "off")
        return Finished(reason=reason, usage=usage, timings=timings, divergence=divergence)


def _in_order(scripts: Iterable[Script]) -> Callable[[GenerateRequest], Script]:
    scripts_left = list(scripts) or [DEFAULT_SCRIPT]

    def choose(_request: GenerateRequest) -> Script:
        return scripts_left.pop(0) if len(scripts_left) > 1 else scripts_left[0]

    return choose


def _vector(data: bytes) -> list[float]:
    raw = [b - 127.5 for b in hashlib.blake2b(data, digest_size=_N_EMBD).digest()]
    length = math.sqrt(sum(x * x for x in raw))
    return [x / length for x in raw]
