"""`make bench-loops`: how often small models repeat themselves, and what their sampling defaults cost in quality.

200 prompts of our own, through the chat template as the chat sends them. A hundred have an answer that can be
checked, copies and repeats among them, which a penalty could spoil; a hundred are open. `loops`: answers that
`RepetitionWatch` ends. `right`: checked answers that hold what they should. `surprise`: nats a token of the open
answers that do not loop, under the model itself; too heavy a penalty raises it.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec
from common import add_out, model_path, write_figure

from edgeinfer.bench import markdown
from edgeinfer.models.catalog import load_catalog
from edgeinfer.runtime.engine import LlamaEngine, load_engine
from edgeinfer.runtime.events import TextDelta
from edgeinfer.runtime.generation import RepetitionWatch
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.runtime.requests import GenerateRequest, Message, Sampling

MODELS = {"smollm2": "smollm2-135m-instruct", "gemma3": "gemma-3-270m"}
#: Sampling on top of the defaults without DRY, by the row's name.
CANDIDATES: dict[str, dict[str, float]] = {
    "without": {},
    "repeat 1.1": {"repeat_penalty": 1.1, "repeat_last_n": 256},
    "DRY 0.4": {"dry_multiplier": 0.4, "dry_allowed_length": 3, "dry_penalty_last_n": 512},
    "DRY 0.8": {"dry_multiplier": 0.8, "dry_allowed_length": 3, "dry_penalty_last_n": 512},
    "DRY 0.8, 4 tokens": {"dry_multiplier": 0.8, "dry_allowed_length": 4, "dry_penalty_last_n": 512},
}
STREAMS = 8

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo", "Russia": "Moscow",
    "Egypt": "Cairo", "Greece": "Athens", "China": "Beijing", "Cuba": "Havana", "Austria": "Vienna", "Norway": "Oslo",
    "Portugal": "Lisbon", "Poland": "Warsaw", "Kenya": "Nairobi", "Peru": "Lima", "Ireland": "Dublin",
    "Canada": "Ottawa", "Sweden": "Stockholm", "Finland": "Helsinki",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small|little", "up": "down", "day": "night", "happy": "sad|unhappy", "fast": "slow", "old": "new|young",
    "light": "dark|heavy", "open": "close|shut", "early": "late",
}  # fmt: skip
FACTS = {
    "How many days are in a week?": "7|seven",
    "How many legs does a spider have?": "8|eight",
    "What colour is the sky on a clear day?": "blue",
    "What do bees make?": "honey",
    "Which planet do we live on?": "earth",
    "What is frozen water called?": "ice",
    "How many months are in a year?": "12|twelve",
    "Which animal says meow?": "cat",
    "What is the largest ocean?": "pacific",
    "Who wrote Romeo and Juliet?": "shakespeare",
}
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.", "Bread is baked from flour, water and salt.",
    "The train to Lisbon leaves at noon.", "My sister plays the violin every evening.",
    "A small boat crossed the wide river.", "Snow fell on the roof all night.",
    "The old clock in the hall is slow.", "We planted three apple trees in spring.",
    "The library opens at nine on Mondays.", "Green tea tastes best without sugar.",
)  # fmt: skip
WORDS = ("rain", "tree", "moon", "bread", "river", "stone", "cloud", "apple", "music", "light")
PEOPLE = ("Anna", "Boris", "Clara", "David", "Emma", "Felix", "Greta", "Henry", "Iris", "Jonas")
THINGS = ("lamp", "bicycle", "coat", "violin", "map", "clock", "kettle", "camera", "ladder", "basket")
PLACES = (
    "kitchen",
    "garden",
    "garage",
    "attic",
    "library",
    "cellar",
    "office",
    "station",
    "school",
    "barn",
)
SUBJECTS = (
    "rain",
    "the sea",
    "bicycles",
    "bread",
    "winter",
    "trains",
    "cats",
    "music",
    "gardens",
    "the moon",
)
FORMS = (
    "Write a haiku about {}, then a python one-liner.",
    "Tell me a short story about {}.",
    "List ten facts about {}.",
    "Explain {} to a child.",
    "Write a poem about {}.",
    "Write a Python class that models {}.",
    "Write a letter to a friend about {}.",
    "What are the advantages and disadvantages of {}?",
    "Make a table with five rows about {}.",
    "Describe {} in detail.",
)


class Prompt(NamedTuple):
    """`holds`: what a right answer holds, `times` over; "" for an open prompt."""

    text: str
    holds: str = ""
    times: int = 1

    def is_right(self, answer: str) -> bool:
        """Tell whether an answer to a checked prompt is right."""
        return len(re.findall(rf"\b(?:{self.holds})", answer, re.IGNORECASE)) >= self.times


def prompts() -> list[Prompt]:
    """All 200, of every kind in turn, so that a part of them is a fair sample."""
    moves = zip(PEOPLE, THINGS, PLACES, strict=True)
    kinds = [
        [Prompt(f"What is the capital of {land}?", city) for land, city in CAPITALS.items()],
        [Prompt(f'What is the opposite of "{word}"?', other) for word, other in OPPOSITES.items()],
        [Prompt(question, answer) for question, answer in FACTS.items()],
        [Prompt(f"What is {n} + {n + 1}?", str(2 * n + 1)) for n in range(1, 11)],
        [Prompt(f"Repeat this sentence exactly: {text}", re.escape(text)) for text in SENTENCES],
        [Prompt(f'Write the word "{word}" five times.', word, 5) for word in WORDS],
        [
            Prompt(f"Count from {n} to {n + 9}.", r"\W+".join(map(str, range(n, n + 10))))
            for n in range(1, 11)
        ],
        [
            Prompt(
                f"{name} left the {thing} in the {place} and went home. The {place} was locked at night. "
                f"In the morning {name} came back for the {thing}. Where was the {thing}?",
                place,
            )
            for name, thing, place in moves
        ],
        [
            Prompt(f"Which of these is a number: {word}, seven, {other}?", "seven")
            for word, other in itertools.pairwise((*WORDS, "door"))
        ],
        *([Prompt(form.format(subject)) for subject in SUBJECTS] for form in FORMS),
    ]
    return [one for row in itertools.zip_longest(*kinds) for one in row if one is not None]


class Answer(NamedTuple):
    """What one prompt got."""

    prompt: Prompt
    text: str
    loops: bool
    surprise: float


def ask(engine: LlamaEngine, prompt: Prompt, sampling: Sampling, seed: int) -> Answer:
    """Answer one prompt, to its end, 128 tokens (32 if it is checked), or a loop."""
    request = GenerateRequest(
        messages=(Message(role="user", content=prompt.text),),
        sampling=msgspec.structs.replace(sampling, seed=seed),
        max_tokens=32 if prompt.holds else 128,
        logprobs=0,
    )
    watch, loops = RepetitionWatch(), False
    pieces, nats = [], []
    generation = engine.submit(request)
    for event in generation:
        if isinstance(event, TextDelta) and not loops:
            pieces.append(event.text)
            nats += [-one.chosen.logprob for one in event.logprobs]
            loops = watch.add(event.text) is not None
            if loops:
                generation.cancel()
    return Answer(prompt, "".join(pieces), loops, statistics.fmean(nats or [0.0]))


def row(
    engine: LlamaEngine, name: str, asked: list[Prompt], sampling: Sampling, show: bool
) -> list[str]:
    """Measure one candidate."""
    with ThreadPoolExecutor(STREAMS) as pool:
        answer: Callable[[int], Answer] = lambda i: ask(engine, asked[i], sampling, i)  # noqa: E731
        answers = list(pool.map(answer, range(len(asked))))
    if show:
        for one in answers:
            print(f"--- {'LOOP ' * one.loops}{one.prompt.text}\n{one.text}")
    checked = [one for one in answers if one.prompt.holds]
    right = sum(one.prompt.is_right(one.text) for one in checked)
    loops = sum(one.loops for one in answers)
    open_ones = [one.surprise for one in answers if not one.prompt.holds and not one.loops]
    surprise = f"{statistics.fmean(open_ones):.2f}" if open_ones else "–"
    return [name, f"{loops} of {len(answers)}", f"{right} of {len(checked)}", surprise]


def main() -> None:
    """Write OUT/loops.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1, help="ask only every Nth prompt")
    parser.add_argument("--all", action="store_true", help="every candidate, not just what is shipped")
    parser.add_argument("--model", choices=MODELS, help="this model alone")
    parser.add_argument("--show", action="store_true", help="print the answers")
    add_out(parser)
    options = parser.parse_args()
    asked = prompts()[:: options.every]
    catalog = load_catalog()
    rows = []
    for short in [options.model] if options.model else MODELS:
        entry = catalog.get(MODELS[short])
        assert entry is not None
        chosen = entry.sampling.over(Sampling())
        plain = msgspec.structs.replace(chosen, dry_multiplier=0.0)
        files = ModelFiles(name=entry.name, paths=(str(model_path(short)),))
        engine = load_engine(files, LoadOptions(n_ctx=512 * STREAMS, n_parallel=STREAMS))
        try:
            for name, given in CANDIDATES.items():
                found = msgspec.structs.replace(plain, **given)
                if options.all or found in (plain, chosen):
                    shipped = "**shipped**: " if found == chosen else ""
                    rows.append([entry.name, *row(engine, shipped + name, asked, found, options.show)])
                    print(rows[-1], flush=True)
        finally:
            engine.close()
    table = markdown(("model", "penalty", "loops", "right", "surprise"), rows)
    print(write_figure(options.out, "loops", table))


if __name__ == "__main__":
    main()
