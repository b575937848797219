"""Loops and monotony in an answer are told from lists, tables and code."""

import itertools

import pytest

from edgeinfer.runtime.event_stream import RepetitionWatch

LOOPS = {
    "a word": "A haiku: " + "Avaid, " * 100,
    "a sentence": "Once. " + "The rain is falling softly on the roof of the house. " * 12,
    "a numbered item": "".join(f"{n}. Rain is a form of water that falls.\n" for n in range(40)),
    "blank lines": "The end." + "\n" * 300,
}
VERBS = "rises falls sleeps sings waits shines burns turns".split()
PLACES = itertools.cycle(["a house", "a river", "the old town", "a hill of stone", "one grey wall"])
PARAGRAPH = " ".join(
    f"The {n}th guest of the evening came from {n + 40} miles away." for n in range(30)
)
#: No two neighbouring parts of these are equal, as a penalty on repeats makes them.
MONOTONOUS = {
    "a poem": "".join(
        f"A place where the soul of the sea {verb} over {landscape},\n"
        for verb, landscape in zip(itertools.islice(itertools.cycle(VERBS), 80), PLACES, strict=False)
    ),
    "a list": "".join(
        f"- 1 teaspoon of {fruit} {verb}, melted\n"
        for fruit, verb in itertools.islice(
            itertools.cycle(itertools.product(("lemon", "apple", "plum"), VERBS[:5])), 90
        )
    ),
}
ANSWERS = {
    "a text quoted whole three times": f"{PARAGRAPH}\n\nAgain:\n{PARAGRAPH}\n\nOnce more:\n{PARAGRAPH}",
    "a block of code": "```python\n"
    + "".join(
        f"def get_{name}(self) -> str:\n    return self.values[index]\n\n"
        for name in map("".join, itertools.product("abcd", "efgh", "ij"))
    )
    + "```\n",
    "a block of code between longer marks": "````python\n"
    + "".join(
        f"def get_{name}(self) -> str:\n    return self.values[index]\n\n"
        for name in map("".join, itertools.product("abcd", "efgh", "ij"))
    )
    + "````\n",
    "a list of records": "".join(
        f'{{"name": "item {n}", "price": {n * 7 % 97}, "colour": "{c}"}}\n'
        for n, c in zip(range(90), itertools.cycle(("red", "green", "blue", "grey")), strict=False)
    ),
    "counting": ", ".join(map(str, range(1, 400))),
    "a table": "| name | price |\n|------|-------|\n"
    + "".join(f"| item {n} | {n * 7 % 97} |\n" for n in range(60)),
    "code": "".join(f"    self.field_{name} = {name}\n" for name in map(chr, range(97, 123))),
    "rows": "".join(f"INSERT INTO customers VALUES ({n}, {n * 7 % 97});\n" for n in range(60)),
    "a rule": "=" * 120 + "\ntext\n" + "=" * 120,
    "a refrain": ("La la la, the sea.\n" * 4 + "And the ships went by one after the other.\n") * 3,
}


def find_loop(text):
    watch = RepetitionWatch()
    return any(watch.add(character) for character in text)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_seen(name):
    assert find_loop(LOOPS[name])


@pytest.mark.parametrize("name", MONOTONOUS)
def test_a_monotonous_answer_is_seen_though_nothing_repeats_exactly(name):
    assert find_loop(MONOTONOUS[name])


@pytest.mark.parametrize("size", [3, 50, 10_000])
@pytest.mark.parametrize("text", [LOOPS["a sentence"], *MONOTONOUS.values()], ids=["loop", *MONOTONOUS])
def test_a_loop_ends_at_one_character_however_the_answer_is_cut(size, text):
    by_character, watch = RepetitionWatch(), RepetitionWatch()
    first = next(i for i, character in enumerate(text, 1) if by_character.add(character))
    pieces = [(offset, watch.add(text[offset : offset + size])) for offset in range(0, len(text), size)]
    assert next(offset + n_kept for offset, n_kept in pieces if n_kept is not None) == first


@pytest.mark.parametrize("name", ANSWERS)
def test_no_loop_is_seen_in_an_ordinary_answer(name):
    assert not find_loop(ANSWERS[name])
