"""`make bench-loops`: how often answers of small models do not end, and what their sampling defaults
cost in quality.

All prompts go through the chat template as the chat sends them; only the model or a token limit stops
an answer.

200 everyday prompts, up to 800 tokens each. `endless`: answers that do not end. `monotonous`: answers
of at least 100 tokens in whose last 400 tokens less than half of the 4-grams are new. `caught`: endless
answers that `RepetitionWatch` would have stopped.

200 prompts with short answers, up to 128 tokens. A hundred answers can be checked, copies and repeats
among them, which a penalty could spoil; a hundred are open. `right`: checked answers that contain the
expected text. `surprise`: nats per token of the open answers that do not loop, under the model itself;
too strong a penalty raises it.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from common import add_out, model_path, write_figure

from edgeinfer.bench import markdown
from edgeinfer.models.catalog import load_catalog
from edgeinfer.runtime.engine import LlamaEngine, load_engine
from edgeinfer.runtime.event_stream import CollectedAnswer, RepetitionWatch
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.runtime.requests import GenerateRequest, Message, Sampling

MODELS = {"smollm2": "smollm2-135m-instruct", "gemma3": "gemma-3-270m"}
DRY: dict[str, Any] = {"dry_multiplier": 0.8, "dry_allowed_length": 3, "dry_penalty_last_n": 512}
#: The row's name → sampling, on top of the defaults without penalties. With a repeat penalty, DRY has
#: no breakers.
CANDIDATES: dict[str, dict[str, Any]] = {
    "without": {},
    "DRY 0.8": DRY,
    "DRY 0.8, repeat 1.1": {**DRY, "dry_sequence_breakers": (), "repeat_penalty": 1.1},
    "DRY 0.8, repeat 1.1, answer only": {
        **DRY,
        "dry_sequence_breakers": (),
        "repeat_penalty": 1.1,
        "penalize_prompt": False,
    },
}
STREAMS = 16
#: An everyday answer should end within this many tokens; its variety is measured over the last ones.
LIMIT, LAST = 800, 400
#: An answer of at least this many tokens is monotonous if its share of new 4-grams is less.
LEAST, NEW_SHARE = 100, 0.5

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
    """`holds` is the text of a right answer, which contains it `times` times; "" for an open prompt."""

    text: str
    holds: str = ""
    times: int = 1

    def is_right(self, answer: str) -> bool:
        """Return whether an answer to a checked prompt is right."""
        return len(re.findall(rf"\b(?:{self.holds})", answer, re.IGNORECASE)) >= self.times


def prompts() -> list[Prompt]:
    """Return all 200, the kinds in turn, so that a part of them is a fair sample."""
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
                f"{name} left the {thing} in the {location} and went home. The {location} was locked at night. "
                f"In the morning {name} came back for the {thing}. Where was the {thing}?",
                location,
            )
            for name, thing, location in moves
        ],
        [
            Prompt(f"Which of these is a number: {word}, seven, {other}?", "seven")
            for word, other in itertools.pairwise((*WORDS, "door"))
        ],
        *([Prompt(form.format(subject)) for subject in SUBJECTS] for form in FORMS),
    ]
    return [prompt for row in itertools.zip_longest(*kinds) for prompt in row if prompt is not None]


class Answer(NamedTuple):
    """The answer to one prompt: `loops` by `RepetitionWatch`, `new_share` of 4-grams in the last
    tokens.
    """

    prompt: Prompt
    text: str
    n_tokens: int
    is_complete: bool
    loops: bool
    new_share: float
    surprise: float

    @property
    def is_monotonous(self) -> bool:
        return self.n_tokens >= LEAST and self.new_share < NEW_SHARE


def new_share(tokens: Sequence[int]) -> float:
    """Return the share of 4-grams in the last tokens that are new in the answer."""
    grams = list(zip(*(tokens[i:] for i in range(4)), strict=False))
    first = max(0, len(grams) - LAST)
    seen, new = set(grams[:first]), 0
    for gram in grams[first:]:
        new += gram not in seen
        seen.add(gram)
    return new / max(1, len(grams) - first)


def ask(engine: LlamaEngine, prompt: Prompt, limit: int, sampling: Sampling, seed: int) -> Answer:
    """Answer one prompt to its end or `limit` tokens; nothing else stops it."""
    request = GenerateRequest(
        messages=(Message(role="user", content=prompt.text),),
        sampling=msgspec.structs.replace(sampling, seed=seed),
        max_tokens=limit,
        logprobs=0,
    )
    answer = CollectedAnswer()
    for event in engine.submit(request):
        answer.add(event)
    nats = [-token.chosen.logprob for token in answer.logprobs]
    return Answer(
        prompt=prompt,
        text=answer.text,
        n_tokens=answer.finish.usage.completion_tokens,
        is_complete=answer.finish.reason == "stop",
        loops=RepetitionWatch().add(answer.text) is not None,
        new_share=new_share(engine.tokenize(answer.text)),
        surprise=statistics.fmean(nats or [0.0]),
    )


def ask_all(
    engine: LlamaEngine, asked: Sequence[Prompt], sampling: Sampling, *, limit: int = 0, seed: int = 0
) -> list[Answer]:
    """Answer all prompts concurrently; the default limit is 128 tokens, or 32 for a checked prompt."""
    with ThreadPoolExecutor(STREAMS) as pool:
        answer: Callable[[int], Answer] = lambda i: ask(  # noqa: E731
            engine, asked[i], limit or (32 if asked[i].holds else 128), sampling, seed + i
        )
        return list(pool.map(answer, range(len(asked))))


def show_answers(answers: Sequence[Answer]) -> None:
    """Print every answer with its prompt and findings."""
    for answer in answers:
        marks = (
            f"{'' if answer.is_complete else 'ENDLESS '}{'LOOP ' * answer.loops}{answer.new_share:.2f}"
        )
        print(f"--- {marks} {answer.n_tokens} {answer.prompt.text}\n{answer.text}")


def everyday_cells(answers: Sequence[Answer]) -> list[str]:
    """Return a row's cells for the everyday prompts."""
    endless = [answer for answer in answers if not answer.is_complete]
    monotonous = sum(answer.is_monotonous for answer in answers)
    caught = sum(answer.loops for answer in endless)
    tokens = statistics.fmean(answer.n_tokens for answer in answers)
    return [f"{len(endless)} of {len(answers)}", str(monotonous), str(caught), f"{tokens:.0f}"]


def checked_cells(answers: Sequence[Answer]) -> list[str]:
    """Return a row's cells for the checked and open prompts."""
    checked = [answer for answer in answers if answer.prompt.holds]
    right = sum(answer.prompt.is_right(answer.text) for answer in checked)
    nats = [answer.surprise for answer in answers if not answer.prompt.holds and not answer.loops]
    return [f"{right} of {len(checked)}", f"{statistics.fmean(nats):.2f}" if nats else "–"]


def main() -> None:
    """Write OUT/loops.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1, help="ask only every Nth prompt")
    parser.add_argument(
        "--all", action="store_true", help="every candidate, not only the shipped defaults"
    )
    parser.add_argument("--row", action="append", choices=CANDIDATES, help="only this candidate")
    parser.add_argument("--model", choices=MODELS, help="only this model")
    parser.add_argument("--prompts", type=Path, help="file with other everyday prompts, one per line")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first prompt")
    parser.add_argument("--show", action="store_true", help="print the answers")
    add_out(parser)
    options = parser.parse_args()
    lines = options.prompts.read_text() if options.prompts else EVERYDAY
    everyday = [Prompt(line) for line in lines.strip().splitlines()][:: options.every]
    short_ones = prompts()[:: options.every]
    catalog = load_catalog()
    rows = []
    for short in [options.model] if options.model else MODELS:
        entry = catalog.get(MODELS[short])
        assert entry is not None
        shipped = entry.default_sampling
        plain = entry.sampling.over(Sampling())
        files = ModelFiles(name=entry.name, paths=(str(model_path(short)),))
        engine = load_engine(files, LoadOptions(n_ctx=1024 * STREAMS, n_parallel=STREAMS))
        try:
            for name, settings in CANDIDATES.items():
                sampling = msgspec.structs.replace(plain, **settings)
                is_wanted = name in options.row if options.row else sampling in (plain, shipped)
                if not (options.all or is_wanted):
                    continue
                answers = ask_all(engine, everyday, sampling, limit=LIMIT, seed=options.seed)
                checked_answers = ask_all(engine, short_ones, sampling)
                if options.show:
                    show_answers([*answers, *checked_answers])
                mark = "**shipped**: " if sampling == shipped else ""
                cells = [*everyday_cells(answers), *checked_cells(checked_answers)]
                rows.append([entry.name, mark + name, *cells])
                print(rows[-1], flush=True)
        finally:
            engine.close()
    head = ("model", "penalty", "endless", "monotonous", "caught", "tokens", "right", "surprise")
    print(write_figure(options.out, "loops", markdown(head, rows)))


EVERYDAY = """
Hi!
Hello, how are you?
Who are you?
What can you do?
Tell me about yourself.
What is the capital of France?
Name three colours.
List ten animals.
What is 17 times 23?
Write a short poem about the sea.
Give me a recipe for pancakes.
How do I boil an egg?
Plan three days in Rome for me.
Write a short email to my landlord about a broken heater.
Make a packing list for a week at the beach.
What is photosynthesis?
Explain gravity to a ten-year-old.
Translate "Good morning, how are you?" into French.
Who wrote Romeo and Juliet?
Write a Python function that reverses a string.
What should I give my mother for her birthday?
Tell me a joke.
Tell me a bedtime story.
What is the meaning of life?
How tall is Mount Everest?
Why is the sky blue?
Give me five ideas for dinner.
What is a good name for a cat?
Suggest names for a coffee shop.
How do I learn to play the guitar?
How can I sleep better?
What are the planets of the solar system?
Write a haiku about autumn.
Explain what a computer is.
What is the difference between a virus and a bacterium?
Summarise the story of Cinderella.
What is machine learning?
Write a thank-you note to a colleague.
Write a birthday wish for my best friend.
Write a cover letter for a job as a waiter.
How do I make coffee?
How do I make tomato soup?
Give me a recipe for chocolate cake.
What can I cook with potatoes and onions?
How long do I cook rice?
What is a vegetarian diet?
List five healthy snacks.
How many calories are in an apple?
How do I lose weight?
Give me a workout plan for beginners.
How do I start running?
What are the benefits of drinking water?
What helps against a cold?
How do I stop a nosebleed?
What are the symptoms of flu?
How can I reduce stress?
How do I meditate?
What is a good morning routine?
How do I save money?
What is inflation?
How does a credit card work?
How do I write a budget?
What is a stock?
How do I ask for a raise?
How do I prepare for a job interview?
List ten questions for a job interview.
Write a resume for a student.
Write an out-of-office message.
Write a letter of complaint about a late parcel.
Write an apology to a customer.
Write an invitation to a garden party.
Write a product description for a wooden chair.
Write a slogan for a bakery.
Write a tweet about spring.
Write a short speech for a wedding.
Write a love letter.
Write a limerick about a dog.
Write a song about summer.
Write the beginning of a detective story.
Write a story about a dragon who is afraid of fire.
Write a dialogue between a cat and a dog.
Describe a sunset.
Describe your favourite city.
Give me ten words that rhyme with "day".
What is a synonym for "happy"?
What is the opposite of "generous"?
Correct this sentence: "She go to school yesterday."
Make this sentence more polite: "Send me the report."
Is it "affect" or "effect"?
What is a verb?
What is the past tense of "run"?
How do you say "thank you" in Spanish?
How do you say "cheese" in German?
Translate "I love you" into Italian.
Translate "The weather is nice today" into Spanish.
Count to ten.
Count from 1 to 20.
What comes after Tuesday?
List the months of the year.
List the days of the week.
How many hours are in a week?
What is 12 + 30?
What is 15 percent of 80?
What is the square root of 144?
Is 17 a prime number?
List the first ten prime numbers.
Convert 10 miles to kilometres.
How many grams are in a pound?
What is pi?
Explain the theorem of Pythagoras.
What is a fraction?
How do I calculate the area of a circle?
What is the capital of Japan?
What is the longest river in the world?
What is the largest country in the world?
Which countries border Germany?
List five cities in Italy.
What language do people speak in Brazil?
What should I see in Paris?
Plan a weekend in London.
What should I pack for a hiking trip?
What is the best time to visit Japan?
How do I get a passport?
Who was Albert Einstein?
Who was Cleopatra?
Who invented the telephone?
Who painted the Mona Lisa?
When did the Second World War end?
What was the Roman Empire?
What was the Industrial Revolution?
Who was the first person on the moon?
Why did the dinosaurs die out?
How do aeroplanes fly?
How does a refrigerator work?
How does the internet work?
What is electricity?
What is DNA?
What is an atom?
What is a black hole?
How far away is the moon?
Why do we have seasons?
Why do leaves change colour in autumn?
What is climate change?
How do bees make honey?
What do cats eat?
How long do dogs live?
How do I train a puppy?
How do I take care of a houseplant?
When should I plant tomatoes?
How do I remove a coffee stain?
How do I clean a window?
How do I unclog a drain?
How do I change a bicycle tyre?
How do I tie a tie?
How do I fold a shirt?
How do I wrap a present?
What should I wear to a wedding?
What are good gifts for children?
What games can we play at a party?
How do I play chess?
What are the rules of football?
Recommend me a book.
Recommend a film for tonight.
What is jazz?
Name five famous composers.
How do I take better photos?
How do I learn a new language?
How do I study for an exam?
Explain the causes of the French Revolution.
Write an essay about friendship.
Write an essay about the advantages of public transport.
What are the pros and cons of working from home?
Compare tea and coffee.
Should I buy a car or a bicycle?
What is democracy?
What is the difference between weather and climate?
Write a Python program that prints the numbers from 1 to 10.
Write a function in JavaScript that adds two numbers.
Write a SQL query that selects all customers from Berlin.
Write an HTML page with a heading and a list.
What is a loop in programming?
What is an API?
Explain recursion with an example.
How do I sort a list in Python?
What is git?
How do I make a strong password?
How do I back up my phone?
What is Wi-Fi?
Make a table with three fruits and their colours.
Give me a shopping list for a barbecue.
Make a to-do list for moving house.
Give me ten ideas for a blog about cooking.
Give me three questions to ask on a first date.
Give me an example of a haiku.
Tell me an interesting fact.
Tell me something about penguins.
What day is it today?
Can you help me?
Thank you!
Good night!
"""

if __name__ == "__main__":
    main()
