"""Run the app once without a terminal, so that a snapshot has its lazy imports and parsed styles.

The run uses no user data, configuration or file: the store is in memory, and the engine is scripted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any, cast

from textual import events
from textual.cache import LRUCache
from textual.pilot import Pilot

from edgeinfer.chat.history.store import memory_store
from edgeinfer.chat.startup import ChatSetup
from edgeinfer.config.config_file import ChatConfig, Config
from edgeinfer.host import EngineHost, LoadProgress, ProcessStart
from edgeinfer.runtime.event_stream import EventStream
from edgeinfer.runtime.events import CacheReport, Finished, TextDelta, Timings, Usage
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.options import EngineInfo, LoadOptions
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.tui import app as app_module
from edgeinfer.tui.app import DARK, LIGHT, ChatApp
from edgeinfer.tui.textual_internals import use_parsed

_ANSWER = (
    "# Title\n\nSome *em*, **strong**, ~~struck~~ `code`, a [link](https://example.com).\n\n> "
    "quote\n\n1. one\n   - nested\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n"
    + "".join(
        f"```{name}\nx = 1  # one\n```\n\n"
        for name in ("python", "bash", "c", "javascript", "json", "html", "rust", "sql")
    )
)
_KEYS = "f1 escape f3 escape slash s tab ctrl+up escape pageup ctrl+end".split()
_CHARACTERS = {"slash": "/", "s": "s"}
#: Number of screen refreshes until a key's effect is painted: one each for the app, the widget, the
#: layout of an opened screen, and the paint.
_REFRESHES = 4
_PAINT_S = 0.2
_LONGEST_S = 20.0


class _ScriptedEngine:
    """The methods of an engine that the rehearsal calls; every answer is `_ANSWER`."""

    is_open = True
    info = EngineInfo(model="rehearsal", n_ctx=4096, n_ctx_train=4096)

    def submit(self, request: GenerateRequest) -> EventStream:
        stream = EventStream(on_cancel=lambda: None)
        stream.put(TextDelta(_ANSWER))
        stream.put(Finished(reason="stop", usage=Usage(), timings=Timings()))
        return stream

    def tokenize_chat(self, request: GenerateRequest) -> list[int]:
        return []

    def close(self) -> None:
        """Do nothing: the engine holds no resources."""


class _RehearsalHost(EngineHost):
    """A host that returns a scripted engine, and reads no configuration."""

    def __init__(self) -> None:
        super().__init__(ProcessStart(how="resumed"), Config())

    def engine(
        self, model: object, options: LoadOptions, progress: LoadProgress | None = None
    ) -> Engine:
        return cast(Engine, _ScriptedEngine())

    def note_prompt(self, last: CacheReport) -> None:
        """Do nothing: `EngineHost` would open a file, and a snapshot must have no open descriptor."""


def rehearse() -> None:
    """Run the app once for each built-in theme, and keep the parsed styles in `app.PARSED` (1.2 s).

    With parsed styles, a process resumed from a snapshot paints its first screen sooner. The run leaves
    no thread, descriptor, file or changed setting.
    """
    removed = {
        name: os.environ.pop(name) for name in ("NO_COLOR", "TEXTUAL_THEME") if name in os.environ
    }
    try:
        for theme in (LIGHT.name, DARK.name):
            parsed = app_module.PARSED[theme] = LRUCache(1024)
            app = ChatApp(_setup(theme), driver_class=None)
            use_parsed(app, parsed)
            asyncio.run(app.run_async(headless=True, size=(80, 24), auto_pilot=_play))
    finally:
        os.environ.update(removed)


def _setup(theme: str) -> ChatSetup:
    return ChatSetup(
        host=_RehearsalHost(),
        model="rehearsal",
        options=LoadOptions(),
        config=ChatConfig(theme=theme),
        open_store=memory_store,
    )


async def _play(pilot: Pilot[Any]) -> None:
    app = cast(ChatApp, pilot.app)
    with contextlib.suppress(TimeoutError):  # an incomplete rehearsal costs launches only milliseconds
        async with asyncio.timeout(_LONGEST_S):
            await _perform(app, pilot)
    app.leave()


async def _perform(app: ChatApp, pilot: Pilot[Any]) -> None:
    while app.chat.session.engine is None:
        await pilot.pause(0.01)
    app.chat.speculative_prefill.enabled = False
    app.chat.send("words", None)
    while app.chat.streaming is not None:
        await pilot.pause(0.01)
    for key in _KEYS:
        app.post_message(events.Key(key, _CHARACTERS.get(key)))
        await _wait_painted(app)


async def _wait_painted(app: ChatApp) -> None:
    """Wait until a key's effect is painted, but not by `Pilot.press`, which may take 1 s per key."""
    for _ in range(_REFRESHES):
        painted = asyncio.Event()
        app.screen.call_after_refresh(painted.set)
        with contextlib.suppress(TimeoutError):  # a closed screen is not painted any more
            await asyncio.wait_for(painted.wait(), _PAINT_S)
    await app.animator.wait_until_complete()
