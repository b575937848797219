"""Driving the app: pilots that wait for a condition and never for a time."""

import contextlib

import pytest
from fixed_chat import FixedHost, make_app, wait_until


class Driven:
    """A running app with its pilot."""

    def __init__(self, app, pilot, host):
        self.app = app
        self.pilot = pilot
        self.host = host
        self.chat = app.chat
        self.session = app.chat.session

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
        await self.pilot.pause()

    async def ask(self, text):
        before = len(self.session.all_turns())
        await self.type(text, "enter")
        await self.until(lambda: self.idle() and len(self.session.all_turns()) >= before + 2)

    async def click(self, mark):
        """Click on the first line of the transcript that has `mark`, three cells into it."""
        rows = self.shown().splitlines()
        y = next(i for i, text in enumerate(rows) if mark in text)
        await self.pilot.click("#transcript", offset=(rows[y].index(mark) + 3, y))
        await self.pilot.pause()

    def idle(self):
        return self.chat.streaming is None and not self.session.busy

    def shown(self):
        """The transcript as text."""
        transcript = self.chat.transcript
        return "\n".join(
            line.text for e in transcript.entries for line in e.lines(transcript.text_width)
        )

    def turns(self):
        return [t.content for t in self.session.path]


@pytest.fixture
def drive(tmp_path):
    """`async with drive(engine=…) as d`: the chat on an 80 by 24 terminal, with its model if `ready`."""

    @contextlib.asynccontextmanager
    async def driving(engine=None, host=None, size=(80, 24), ready=True, **fields):
        host = host or FixedHost(engine)
        app = make_app(tmp_path, host, **fields)
        async with app.run_test(size=size, notifications=True) as pilot:
            driven = Driven(app, pilot, host)
            if ready:
                await driven.ready()
            yield driven

    return driving
