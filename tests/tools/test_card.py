"""The card of a tool call shows the whole call, a long one page by page."""

import random
import re
import string

import pytest

from edgeinfer.tools.approval import Decision
from edgeinfer.tools.loop import Card


def unescape(text):
    return re.sub(
        r"\\(\\|x..|u....|U........)", lambda m: "\\" if m[1] == "\\" else chr(int(m[1][1:], 16)), text
    )


def card(arguments, **fields):
    return Card(id="c", server="s", tool="t", arguments=arguments, pattern="", **fields)


def shown_arguments(text):
    """Return the arguments that a card in a terminal shows."""
    lines = text.split("\n")
    assert lines[0] == "s · t wants to run"
    assert lines[-1] == "y once · a always in this conversation · n REASON refuses"
    values = []
    for line in lines[1:-1]:
        if line.startswith("  | "):
            values[-1] += "\n" + line[4:]
        else:
            values.append(line[2:])
    return {name: unescape(value) for name, _, value in (v.partition(": ") for v in values)}


HIDDEN = [
    *map(
        chr,
        (*range(0x20), *range(0x7F, 0xA1), 0xAD, 0x34F, 0x61C, 0x115F, 0x3164, 0xFEFF, 0xD800, 0xDFFF),
    ),
    *map(chr, (*range(0x2000, 0x2010), *range(0x2028, 0x2030), *range(0x205F, 0x2070), 0x3000, 0x2800)),
    *map(chr, (*range(0xE0000, 0xE0080), *range(0xFE00, 0xFE10), 0xE0100, 0xE01EF, 0x180E, 0xFFA0)),
    *("\x1b]", "\x1b]0;x\x07", "\x1b[2J", "\x1bP", "\x1b\\", "\x9d"),
]


def test_a_card_shows_the_call_character_for_character():
    """10,000 generated arguments: all shown text is visible, and has one meaning."""
    choose = random.Random(11)
    letters = [*HIDDEN, *"\\\\\\xuUn|: \n\t", *string.ascii_letters]
    letters += ["\n  | ", "  command: ", r"\x1b", "é漢👩"]
    for _ in range(10_000):
        size = choose.randrange(0, 60)
        arguments = {name: "".join(choose.choices(letters, k=size)) for name in ("command", "path")}
        text = card(arguments).text()
        assert shown_arguments(text) == arguments
        assert all(c in "\n\t" or c.isprintable() for c in text)
        plain = card(arguments).page_fields()["arguments"]
        assert {name: unescape(value) for name, value in plain.items()} == arguments
        diff = card({"path": "a"}, diff=arguments["path"] or "+").page_fields()["diff"]
        assert unescape(diff) == (arguments["path"] or "+")


def test_names_in_a_card_stay_on_their_line():
    shown = Card(id="c", server="s\n", tool="t\x1b]\n", arguments={"a\n  b: c": "d"}, pattern="p\u200b")
    lines = shown.text().split("\n")
    assert lines[0] == r"s\x0a · t\x1b]\x0a wants to run"
    assert lines[1:2] == [r'  "a\n  b: c": d']
    assert r"p\u200b" in lines[2]
    assert len(lines) == 3


@pytest.mark.parametrize("early", ["y", "a", "p", "m", "", "yes"])
@pytest.mark.parametrize("text", ["line\n" * 500, "x" * 50_000, "\n" * 200, "a b " * 9000])
def test_a_long_card_takes_a_yes_on_its_last_page_only(early, text):
    pages = []

    def ask(page):
        pages.append(page)
        return "y" if page.endswith("n REASON refuses") and "m next page" not in page else early

    assert card({"command": text}).ask(ask) == Decision("once")
    assert len(pages) > 2
    assert all(page.count("\n") <= 41 and len(page) < 4200 for page in pages)
    joined = "".join(page.partition("… page")[0] for page in pages)
    assert joined.replace("\n", "") == card({"command": text}).text().replace("\n", "")


@pytest.mark.parametrize(
    ("typed", "decision"),
    [
        ("n too long", Decision("no", "too long")),
        ("n", Decision("no")),
        (None, Decision("no", "stopped")),
    ],
)
def test_a_long_card_can_be_refused_on_each_page(typed, decision):
    for page in (1, 2, 3):
        answers = [*["m"] * (page - 1), typed]
        long = card({"command": "line\n" * 90})
        assert long.ask(lambda _, answers=answers: answers.pop(0)) == decision
