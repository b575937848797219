"""A chat with a fixed clock, engine and list of models, for tests, snapshots and screenshots."""

import asyncio
import itertools
import time

from fake_engine import DEFAULT_INFO, FakeEngine
from msgspec.structs import replace
from textual import events

from edgeinfer.chat.history.store import ConversationStore
from edgeinfer.chat.model_choices import ModelChoice
from edgeinfer.chat.startup import ChatSetup
from edgeinfer.config.config_file import ChatConfig, Config
from edgeinfer.host import EngineHost, ProcessStart
from edgeinfer.models.catalog import Model
from edgeinfer.models.fits import FirstRunChoice, fit
from edgeinfer.platform.machine import Memory, Rate
from edgeinfer.runtime.events import Finished, Timings, Usage
from edgeinfer.runtime.options import LoadOptions
from edgeinfer.tui.app import ChatApp

MODEL = "smollm2-135m-instruct"
NOON = 1_790_000_000_000
#: Memory of the machine, which decides which models fit.
MEMORY = Memory(total_bytes=4 * 10**9, available_bytes=4 * 10**9, reason="made up")


def end(prompt=312, cached=280, completion=96, reason="stop", ttft=23.0, decode=2261.0):
    """Return the event that ends an answer, with fixed figures."""
    return Finished(
        reason=reason,
        usage=Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion),
        timings=Timings(ttft_ms=ttft, decode_ms=decode),
    )


def words(text):
    """Return a script that generates `text` word by word, and ends with fixed figures."""
    return [*(w + " " for w in text.split(" ")), end()]


def make_choice(name, title, parameters, context, size, **state):
    return ModelChoice(
        name=name,
        title=title,
        parameters=parameters,
        licence="Apache-2.0",
        context_length=context,
        size_bytes=size,
        fit=fit(size, "chat", 1.0, Rate(40e9, 2, busy=False), memory=MEMORY),
        **state,
    )


SHELF = [
    make_choice(MODEL, "SmolLM2 135M Instruct", "135M", 8192, 98_362_432, pulled=True, warm=True),
    make_choice("qwen3-0.6b", "Qwen3 0.6B", "0.6B", 32768, 484_000_000, size_is_estimate=True),
    make_choice("mistral-7b-instruct", "Mistral 7B", "7B", 32768, 4_370_000_000),
]


def make_offer(role, name, reason, size, rate):
    sources = ("file:/x.gguf",)
    model = Model(name=name, title=name, sources=sources, size_bytes=size, licence="Apache-2.0")
    return FirstRunChoice(role, reason, model, rate)


#: Models that a first run offers.
OFFERED = [
    make_offer("comfortable", "qwen3-0.6b", "answers faster than you can read", 484_000_000, 31.0),
    make_offer("tiny", MODEL, "small and quick to download, simple answers", 98_362_432, 140.0),
]
EMPTY_SHELF = [replace(row, pulled=False, warm=False) for row in SHELF]


class FixedHost(EngineHost):
    """A host that was resumed in 84 ms. It returns the given engine, or raises `errors` first."""

    def __init__(self, engine=None, start=None, errors=(), config=None):
        start = start or ProcessStart(how="resumed", stages_ms={"ready": 84.0})
        super().__init__(start, config or Config())
        self.fake = engine or FakeEngine(info=replace(DEFAULT_INFO, n_ctx=2048))
        self.errors = list(errors)
        self.opened = []

    def engine(self, model, options, progress=None):
        self.opened.append((model, options.n_ctx))
        if self.errors:
            raise self.errors.pop(0)
        return self.fake

    def worker(self, model, options, progress=None):
        return self.engine(model, options, progress)

    def warm_models(self):
        return frozenset({MODEL})


def fixed_clock():
    ticks = itertools.count(NOON, 1000)
    return lambda: next(ticks)


def make_setup(path, host=None, **fields):
    host = host or FixedHost()
    clock = fields.pop("clock", None) or fixed_clock()
    return ChatSetup(
        host=host,
        model=MODEL,
        options=LoadOptions(),
        config=fields.pop("config", ChatConfig()),
        open_store=lambda: ConversationStore.open(path / "conversations.db", clock),
        **fields,
    )


def make_app(path, host=None, **fields):
    return ChatApp(make_setup(path, host, **fields), driver_class=None)


async def wait_until(pilot, condition, seconds=60.0):
    """Let the app work until `condition()` is true; return its value."""
    deadline = time.monotonic() + seconds
    while not (outcome := condition()):
        assert time.monotonic() < deadline, "the condition did not come true"
        await pilot.pause()
        await asyncio.sleep(0)
    await pilot.pause()
    return outcome


class Driven:
    """A running app with its pilot."""

    def __init__(self, pilot):
        self.pilot = pilot
        self.app = pilot.app
        self.chat = pilot.app.chat
        self.host = self.chat.setup.host
        self.session = self.chat.session

    async def until(self, condition):
        return await wait_until(self.pilot, condition)

    async def ready(self):
        await self.until(lambda: self.session.engine is not None)

    async def type(self, text, *keys):
        self.chat.composer.fill(text)
        await self.pilot.pause()
        await self.press(*keys)

    async def press(self, *keys):
        await self.pilot.press(*keys)
        await self.until(lambda: self.app.key_order.is_idle)

    async def burst(self, *keys):
        """Press keys faster than the app handles them."""
        for key in keys:
            self.app.post_message(events.Key(key, key if len(key) == 1 else None))
        await self.until(lambda: self.app.key_order.is_idle)

    async def ask(self, text):
        before = len(self.session.all_turns())
        await self.type(text, "enter")
        await self.until(lambda: self.idle() and len(self.session.all_turns()) >= before + 2)

    async def leave_draft(self, text):
        """Type `text` into the open conversation, then open a new one; return the first one's number."""
        number = self.session.conversation.id
        await self.type(text)
        await self.until(lambda: self.session.conversation.draft == text)
        self.chat.run_command("/new")
        self.chat.composer.fill("")
        return number

    async def click(self, mark):
        """Click into the first line of the transcript with `mark`, three cells after its start."""
        rows = self.screen_text().splitlines()
        y = next(i for i, text in enumerate(rows) if mark in text)
        await self.pilot.click("#transcript", offset=(rows[y].index(mark) + 3, y))
        await self.pilot.pause()

    def idle(self):
        return self.chat.streaming is None and not self.session.busy

    def screen_text(self):
        """Return the transcript as text."""
        transcript = self.chat.transcript
        lines = [entry.lines(transcript.text_width) for entry in transcript.entries]
        return "\n".join(line.text for line in itertools.chain(*lines))

    def status_text(self):
        self.chat.view.refresh_status()
        return " · ".join(part.text for part in self.chat.status._parts)

    def turns(self):
        return [t.content for t in self.session.path]
