"""Scenes: what each screen needs before it is looked at.

The snapshots and the README's screenshots are taken of them.
"""

import re
import threading

import msgspec
from fixed_chat import EMPTY_SHELF, MODEL, SHELF, FixedHost, end, wait_until, words

from edgeinfer.chat.history.values import Attachment
from edgeinfer.errors import ContextLengthError, DecodeError, ModelNotPulledError
from edgeinfer.runtime.events import ReasoningDelta
from edgeinfer.runtime.fake import DEFAULT_INFO, FakeEngine, Gate

ANSWER = """Quicksort picks a *pivot* and sorts what is **smaller** and what is larger:

```python
def sort(xs: list[int]) -> list[int]:
    if not xs:
        return []  # nothing to do
    first, *rest = xs
    return sort([x for x in rest if x < first]) + [first] + sort([x for x in rest if x >= first])
```

1. the base case
2. the pivot, `xs[0]`
   - which could be any

> It is fast on average.

| case | cost |
|---|---|
| average | `n log n` |
| worst | `n²` |
"""

QUESTION = "Write quicksort in Python and explain it."


def script():
    return [
        ReasoningDelta("The user wants quicksort. I should keep it short."),
        *re.findall(r"\S+\s*", ANSWER),
        end(),
    ]


class Scene:
    """What a screen needs before it is looked at."""

    shelf = SHELF

    def __init__(self, engine=None, host=None, **fields):
        self.host = host or FixedHost(engine or FakeEngine([script()]))
        self.fields = fields

    async def prepare(self, pilot):
        """Bring the app there."""

    async def ask(self, pilot, text):
        chat = pilot.app.chat
        await wait_until(
            pilot, lambda: chat.session.engine is not None or chat.launch.host.errors == []
        )
        chat.send(text, None)
        await wait_until(
            pilot,
            lambda: (
                chat.streaming is None
                and chat.session.head.role == "assistant"
                and not chat.session.busy
            ),
        )


class Empty(Scene):
    async def prepare(self, pilot):
        await wait_until(pilot, lambda: pilot.app.chat.session.engine is not None)


class Answered(Scene):
    async def prepare(self, pilot):
        await self.ask(pilot, QUESTION)


class Top(Answered):
    async def prepare(self, pilot):
        await super().prepare(pilot)
        await pilot.press("ctrl+t", "ctrl+home")


class Writing(Scene):
    def __init__(self):
        self.gate = Gate(threading.Event())
        super().__init__(
            FakeEngine([["Quicksort picks a *pivot* and sorts what is **smal", self.gate, "ler**"]])
        )

    async def prepare(self, pilot):
        chat = pilot.app.chat
        await wait_until(pilot, lambda: chat.session.engine is not None)
        chat.send(QUESTION, None)
        await wait_until(
            pilot,
            lambda: chat.streaming is not None and "smal" in chat.streaming.entry.lines(60)[0].text,
        )
        chat.streaming.tokens, chat.streaming.began = 0, float("inf")
        chat.refresh_status()


class Completing(Answered):
    async def prepare(self, pilot):
        await super().prepare(pilot)
        await pilot.press("slash", "s", "down")


class Chosen(Scene):
    def __init__(self):
        super().__init__(
            FakeEngine([words("The first answer."), words("The second answer, a bit longer.")])
        )

    async def prepare(self, pilot):
        await self.ask(pilot, "What is a pivot?")
        await pilot.press("ctrl+r")
        await wait_until(
            pilot,
            lambda: pilot.app.chat.streaming is None and len(pilot.app.chat.session.all_turns()) == 3,
        )
        await pilot.press("ctrl+up", "ctrl+up")


class Editing(Chosen):
    async def prepare(self, pilot):
        await super().prepare(pilot)
        await pilot.press("e")


class Trouble(Scene):
    def __init__(self):
        attachment = Attachment(name="stdin", text="x" * 1204)
        super().__init__(
            FakeEngine([["Half of it ", DecodeError("llama_decode failed: no KV slot")]]),
            attachments=[attachment],
        )

    async def prepare(self, pilot):
        await self.ask(pilot, QUESTION)


class Full(Answered):
    async def prepare(self, pilot):
        await super().prepare(pilot)
        pilot.app.chat.offer_room(
            ContextLengthError("the prompt of 2,311 tokens does not fit the context of 2,048 tokens")
        )


class Stats(Answered):
    async def prepare(self, pilot):
        await super().prepare(pilot)
        pilot.app.chat.session.engine._info = msgspec.structs.replace(DEFAULT_INFO, load_ms=312.0)
        pilot.app.chat.run_command("/stats")


class Models(Answered):
    async def prepare(self, pilot):
        await super().prepare(pilot)
        await pilot.press("f2")
        await wait_until(pilot, lambda: getattr(pilot.app.screen, "rows", None))
        await pilot.press("down")


class First(Scene):
    shelf = EMPTY_SHELF

    def __init__(self):
        super().__init__(
            host=FixedHost(errors=[ModelNotPulledError(f"{MODEL} is not on this machine yet")])
        )

    async def prepare(self, pilot):
        await wait_until(pilot, lambda: getattr(pilot.app.screen, "rows", None))
        pilot.app.screen._begin("pulling")
        pilot.app.screen._progress(
            "downloading  SmolLM2.gguf  ━━━━━━━━━━──────────  46 of 92 MB  8.2 MB/s  6 s left"
        )


class Sessions(Scene):
    def __init__(self):
        super().__init__(
            FakeEngine(lambda r: words("Whip the egg whites until stiff, then fold them in."))
        )

    async def prepare(self, pilot):
        for question in ("How do I cook a soufflé?", "Why does my soufflé fall?", "What is a monad?"):
            await self.ask(pilot, question)
            await pilot.press("ctrl+n")
        await pilot.press("f3")
        await pilot.pause()


class Searching(Sessions):
    async def prepare(self, pilot):
        await super().prepare(pilot)
        pilot.app.screen.query_one("#words").value = "egg whites"
        await wait_until(pilot, lambda: pilot.app.screen.found and pilot.app.screen.found[0].snippet)


class Help(Answered):
    async def prepare(self, pilot):
        await super().prepare(pilot)
        await pilot.press("f1")


SCENES = {
    scene.__name__.lower(): scene
    for scene in (
        Empty,
        Answered,
        Top,
        Writing,
        Completing,
        Chosen,
        Editing,
        Trouble,
        Full,
        Stats,
        Models,
        First,
        Sessions,
        Searching,
        Help,
    )
}
