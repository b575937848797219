"""Loops in an answer are told from lists, tables and code."""

import pytest

from edgeinfer.runtime.generation import RepetitionWatch

LOOPS = {
    "a word": "A haiku: " + "Avaid, " * 100,
    "a sentence": "Once. " + "The rain is falling softly on the roof of the house. " * 12,
    "a numbered item": "".join(f"{n}. Rain is a form of water that falls.\n" for n in range(40)),
    "blank lines": "The end." + "\n" * 300,
}
ANSWERS = {
    "counting": ", ".join(map(str, range(1, 400))),
    "a table": "| name | price |\n|------|-------|\n"
    + "".join(f"| item {n} | {n * 7 % 97} |\n" for n in range(60)),
    "code": "".join(f"    self.field_{name} = {name}\n" for name in map(chr, range(97, 123))),
    "rows": "".join(f"INSERT INTO customers VALUES ({n}, {n * 7 % 97});\n" for n in range(60)),
    "a rule": "=" * 120 + "\ntext\n" + "=" * 120,
    "a refrain": ("La la la, the sea.\n" * 4 + "And the ships went by one after the other.\n") * 3,
}


def watched(text):
    watch = RepetitionWatch()
    return any(watch.add(character) for character in text)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_seen(name):
    assert watched(LOOPS[name])


@pytest.mark.parametrize("size", [3, 50, 10_000])
def test_a_loop_ends_at_one_character_however_the_answer_is_cut(size):
    text = LOOPS["a sentence"]
    by_character, watch = RepetitionWatch(), RepetitionWatch()
    first = next(i for i, character in enumerate(text, 1) if by_character.add(character))
    pieces = [(at, watch.add(text[at : at + size])) for at in range(0, len(text), size)]
    assert next(at + kept for at, kept in pieces if kept is not None) == first


@pytest.mark.parametrize("name", ANSWERS)
def test_no_loop_is_seen_in_an_ordinary_answer(name):
    assert not watched(ANSWERS[name])
