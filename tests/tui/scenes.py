"""Scenes: what each screen needs before it is looked at.

The snapshots and the README's screenshots are taken of them.
"""

import re
import threading
from typing import Any, NamedTuple

import msgspec
from fake_engine import DEFAULT_INFO, FakeEngine, StepGate
from fixed_chat import EMPTY_SHELF, MODEL, SHELF, Driven, FixedHost, end, words

from edgeinfer.chat.history.values import Attachment
from edgeinfer.errors import ContextLengthError, DecodeError, ModelNotPulledError
from edgeinfer.runtime.events import ReasoningDelta

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
            host = FixedHost(engine, errors=errors)
            return Scene(host, shelf, fields, lambda pilot: prepare(Driven(pilot)))

        SCENES[prepare.__name__] = make
        return prepare

    return register


@scene()
async def empty(d):
    await d.ready()


@scene(quicksort)
async def answered(d):
    await d.ready()
    await d.ask(QUESTION)


@scene(quicksort)
async def top(d):
    await answered(d)
    await d.press("ctrl+t", "ctrl+home")


@scene(
    lambda: ["Quicksort picks a *pivot* and sorts what is **smal", StepGate(threading.Event()), "ler**"]
)
async def writing(d):
    await d.ready()
    await d.type(QUESTION, "enter")
    await d.until(lambda: d.chat.streaming and "smal" in d.chat.streaming.entry.lines(60)[0].text)
    d.chat.streaming.tokens, d.chat.streaming.began = 0, float("inf")
    d.chat.refresh_status()


@scene(quicksort)
async def completing(d):
    await answered(d)
    await d.press("slash", "s", "down")


@scene(words("The first answer."), words("The second answer, a bit longer."))
async def chosen(d):
    await d.ready()
    await d.ask("What is a pivot?")
    await d.press("ctrl+r")
    await d.until(lambda: d.idle() and len(d.session.all_turns()) == 3)
    await d.press("ctrl+up", "ctrl+up")


@scene(words("The first answer."), words("The second answer, a bit longer."))
async def editing(d):
    await chosen(d)
    await d.press("e")


@scene(
    ["Half of it ", DecodeError("llama_decode failed: no KV slot")],
    attachments=[Attachment(name="stdin", text="x" * 1204)],
)
async def trouble(d):
    await answered(d)


@scene(quicksort)
async def full(d):
    await answered(d)
    d.chat.offer_room(
        ContextLengthError("the prompt of 2,311 tokens does not fit the context of 2,048 tokens")
    )


@scene(quicksort)
async def stats(d):
    await answered(d)
    d.session.engine._info = msgspec.structs.replace(DEFAULT_INFO, load_ms=312.0)
    d.chat.run_command("/stats")


@scene(quicksort)
async def models(d):
    await answered(d)
    await d.press("f2")
    await d.until(lambda: getattr(d.app.screen, "rows", None))
    await d.press("down")


@scene(errors=[ModelNotPulledError(f"{MODEL} is not on this machine yet")], shelf=EMPTY_SHELF)
async def first(d):
    await d.until(lambda: getattr(d.app.screen, "rows", None))
    d.app.screen._begin("pulling")
    d.app.screen._progress(
        "downloading  SmolLM2.gguf  ━━━━━━━━━━──────────  46 of 92 MB  8.2 MB/s  6 s left"
    )


@scene(words("Whip the egg whites until stiff, then fold them in."))
async def sessions(d):
    await d.ready()
    for question in ("How do I cook a soufflé?", "Why does my soufflé fall?", "What is a monad?"):
        await d.ask(question)
        await d.press("ctrl+n")
    await d.press("f3")


@scene(words("Whip the egg whites until stiff, then fold them in."))
async def searching(d):
    await sessions(d)
    d.app.screen.query_one("#words").value = "egg whites"
    await d.until(lambda: d.app.screen.found and d.app.screen.found[0].snippet)


@scene(quicksort)
async def help(d):
    await answered(d)
    await d.press("f1")
