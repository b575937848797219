"""Scenes: what each screen needs before it is looked at.

The snapshots and the README's screenshots are taken of them.
"""

import re
import threading
from typing import Any, NamedTuple

import msgspec
from fixed_chat import EMPTY_SHELF, MODEL, SHELF, FixedHost, end, wait_until, words

from edgeinfer.chat.history.values import Attachment
from edgeinfer.errors import ContextLengthError, DecodeError, ModelNotPulledError
from edgeinfer.runtime.events import ReasoningDelta
from edgeinfer.runtime.fake import DEFAULT_INFO, FakeEngine, StepGate

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


def quicksort():
    thought = ReasoningDelta("The user wants quicksort. I should keep it short.")
    return [thought, *re.findall(r"\S+\s*", ANSWER), end()]


class Scene(NamedTuple):
    """What a screen needs: a host, models, fields of the launch, and `prepare`, which brings it there."""

    host: Any
    shelf: list
    fields: dict
    prepare: Any


#: A function that makes the scene, by its name.
SCENES = {}


def scene(*scripts, errors=(), shelf=SHELF, **fields):
    """Register the decorated function as `prepare` of a scene whose engine plays `scripts`."""

    def register(prepare):
        def make():
            engine = FakeEngine([script() if callable(script) else script for script in scripts])
            return Scene(FixedHost(engine, errors=errors), shelf, fields, prepare)

        SCENES[prepare.__name__] = make
        return prepare

    return register


async def ready(pilot):
    chat = pilot.app.chat
    await wait_until(pilot, lambda: chat.session.engine is not None)
    return chat


async def ask(pilot, text):
    chat = await ready(pilot)
    turns = len(chat.session.all_turns())
    chat.send(text, None)
    await wait_until(
        pilot, lambda: chat.streaming is None and len(chat.session.all_turns()) == turns + 2
    )
    return chat


@scene()
async def empty(pilot):
    await ready(pilot)


@scene(quicksort)
async def answered(pilot):
    return await ask(pilot, QUESTION)


@scene(quicksort)
async def top(pilot):
    await answered(pilot)
    await pilot.press("ctrl+t", "ctrl+home")


@scene(
    lambda: ["Quicksort picks a *pivot* and sorts what is **smal", StepGate(threading.Event()), "ler**"]
)
async def writing(pilot):
    chat = await ready(pilot)
    chat.send(QUESTION, None)
    await wait_until(
        pilot, lambda: chat.streaming is not None and "smal" in chat.streaming.entry.lines(60)[0].text
    )
    chat.streaming.tokens, chat.streaming.began = 0, float("inf")
    chat.refresh_status()


@scene(quicksort)
async def completing(pilot):
    await answered(pilot)
    await pilot.press("slash", "s", "down")


@scene(words("The first answer."), words("The second answer, a bit longer."))
async def chosen(pilot):
    chat = await ask(pilot, "What is a pivot?")
    await pilot.press("ctrl+r")
    await wait_until(pilot, lambda: chat.streaming is None and len(chat.session.all_turns()) == 3)
    await pilot.press("ctrl+up", "ctrl+up")


@scene(words("The first answer."), words("The second answer, a bit longer."))
async def editing(pilot):
    await chosen(pilot)
    await pilot.press("e")


@scene(
    ["Half of it ", DecodeError("llama_decode failed: no KV slot")],
    attachments=[Attachment(name="stdin", text="x" * 1204)],
)
async def trouble(pilot):
    await ask(pilot, QUESTION)


@scene(quicksort)
async def full(pilot):
    chat = await answered(pilot)
    chat.offer_room(
        ContextLengthError("the prompt of 2,311 tokens does not fit the context of 2,048 tokens")
    )


@scene(quicksort)
async def stats(pilot):
    chat = await answered(pilot)
    chat.session.engine._info = msgspec.structs.replace(DEFAULT_INFO, load_ms=312.0)
    chat.run_command("/stats")


@scene(quicksort)
async def models(pilot):
    await answered(pilot)
    await pilot.press("f2")
    await wait_until(pilot, lambda: getattr(pilot.app.screen, "rows", None))
    await pilot.press("down")


@scene(errors=[ModelNotPulledError(f"{MODEL} is not on this machine yet")], shelf=EMPTY_SHELF)
async def first(pilot):
    await wait_until(pilot, lambda: getattr(pilot.app.screen, "rows", None))
    pilot.app.screen._begin("pulling")
    pilot.app.screen._progress(
        "downloading  SmolLM2.gguf  ━━━━━━━━━━──────────  46 of 92 MB  8.2 MB/s  6 s left"
    )


@scene(words("Whip the egg whites until stiff, then fold them in."))
async def sessions(pilot):
    for question in ("How do I cook a soufflé?", "Why does my soufflé fall?", "What is a monad?"):
        await ask(pilot, question)
        await pilot.press("ctrl+n")
    await pilot.press("f3")
    await pilot.pause()


@scene(words("Whip the egg whites until stiff, then fold them in."))
async def searching(pilot):
    await sessions(pilot)
    pilot.app.screen.query_one("#words").value = "egg whites"
    await wait_until(pilot, lambda: pilot.app.screen.found and pilot.app.screen.found[0].snippet)


@scene(quicksort)
async def help(pilot):
    await answered(pilot)
    await pilot.press("f1")
