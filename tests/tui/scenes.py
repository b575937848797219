"""Scenes: screens of the app in a certain state, for snapshots and the README's screenshots."""

import re
from typing import Any, NamedTuple

from fake_engine import FakeEngine
from fixed_chat import EMPTY_SHELF, MODEL, SHELF, Driven, FixedHost, end, words

from edgeinfer.errors import ContextLengthError, ModelNotPulledError
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
    """A host and a list of models; `prepare` makes the app show the scene."""

    host: Any
    shelf: list
    prepare: Any


#: Name → scene.
SCENES = {}


def scene(*scripts, errors=(), shelf=SHELF):
    """Register the decorated function as `prepare` of a scene whose engine plays `scripts`."""

    def register(prepare):
        def make():
            engine = FakeEngine([script() if callable(script) else script for script in scripts])
            host = FixedHost(engine, errors=errors)
            return Scene(host, shelf, lambda pilot: prepare(Driven(pilot)))

        SCENES[prepare.__name__] = make
        return prepare

    return register


@scene(quicksort)
async def answer_question(d):
    await d.ready()
    await d.ask(QUESTION)


@scene(quicksort)
async def completing(d):
    await answer_question(d)
    await d.press("slash", "s", "down")


@scene(quicksort)
async def full(d):
    await answer_question(d)
    d.chat.offer_context_choices(
        ContextLengthError("the prompt of 2,311 tokens does not fit the context of 2,048 tokens")
    )


@scene(quicksort)
async def models(d):
    await answer_question(d)
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
async def searching(d):
    await d.ready()
    for question in ("How do I cook a soufflé?", "Why does my soufflé fall?", "What is a monad?"):
        await d.ask(question)
        await d.press("ctrl+n")
    await d.press("f3")
    d.app.screen.query_one("#words").value = "egg whites"
    await d.until(lambda: d.app.screen.summaries and d.app.screen.summaries[0].snippet)


@scene(quicksort)
async def help(d):
    await answer_question(d)
    await d.press("f1")
