"""Markdown as lines: a growing text is drawn like the whole, without terminal escapes."""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_markdown import MARKDOWN, split
from rich.cells import cell_len

from edgeinfer.chat.history.values import Attachment, Stats, Turn
from edgeinfer.tui.drawing.entry import AnswerEntry, Question, Remark, Welcome
from edgeinfer.tui.drawing.lines import Line, Span, clean
from edgeinfer.tui.drawing.markdown import RenderedMarkdown

DOCUMENT = """# Title

Some *em* **bold with `code`** and a [link](https://example.com/x), long enough\
 to be wrapped around the edge of the screen.
Soft break\\
hard break, ~~struck~~

> quote
> - in quote

1. one
2. two
   - nested

     its paragraph
10. ten

- loose

- list

| a | b column |
|---|---:|
| 1 | some longer cell text that must be wrapped since it is far too long |
| 你好 | `y` |

```python
def f(x: int) -> str:
\treturn f"{x}"  # comment
```

---

### H3
End <b>html</b> and ![img](https://e.example/x.png).

    indented code
"""


def texts(source, width=60):
    return [line.text for line in RenderedMarkdown(source, width).lines]


def styles(source, width=60):
    return {s.style for line in RenderedMarkdown(source, width).lines for s in line.spans}


@pytest.mark.parametrize("width", [20, 33, 60, 100])
def test_no_line_is_wider_than_asked(width):
    assert all(cell_len(text) <= width for text in texts(DOCUMENT, width))


def test_blocks_are_drawn_as_expected():
    drawn = texts(DOCUMENT)
    for line in (
        "Title",
        "▎ quote",
        "▎ • in quote",
        "1. one",
        "   ◦ nested",
        "• loose",
        "─" * 60,
        "H3",
        "End <b>html</b> and [image: img].",
        "  indented code",
    ):
        assert line in drawn, line
    assert "Soft break" in drawn
    assert "hard break, struck" in drawn
    assert any(line.startswith("  python") and line.endswith("copy 1 ") for line in drawn)
    assert any(line.startswith("a    │ ") and line.endswith(" b column") for line in drawn)


def test_columns_are_aligned_and_formulas_and_tasks_kept():
    table = "| n | cost | mid |\n|---|---:|:-:|\n| a | 1,200.00 | x |\n| b | 7.50 | xyz |"
    assert texts(table)[2:] == ["a │ 1,200.00 │  x", "b │     7.50 │ xyz"]
    formulas = "Thus \\( x_1 * y_1 \\)\n\\[\n- b\n= c\n\\]\nso $$a_b$$ and $c_d_$."
    lines = ["Thus \\( x_1 * y_1 \\)", "", "\\[", "- b", "= c", "\\]", "", "so $$a_b$$ and $c_d_$."]
    assert texts(formulas) == lines
    assert texts("- [ ] buy\n- [x] pay\n- [x](https://a.b)") == ["• ☐ buy", "• ☑ pay", "• x"]
    assert "link:https://a.b/c" in styles("see https://a.b/c.")


@settings(max_examples=300, deadline=None)
@example(DOCUMENT, random.Random(0), 60)
@given(MARKDOWN, st.randoms(use_true_random=False), st.sampled_from([10, 24, 60]))
def test_any_text_is_drawn_and_any_split_as_the_whole(text, dice, width):
    body = RenderedMarkdown("", width)
    for piece in split(text, dice):
        body.append(piece)
    assert body.lines == RenderedMarkdown(text, width).lines
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for line in body.lines for c in line.text)
    links = [s.style for line in body.lines for s in line.spans if s.style.startswith("link:")]
    assert all(style[5:].lower().startswith(("http://", "https://", "mailto:")) for style in links)


def test_styles_are_named():
    names = "h1 em strong strike code-inline bullet code-keyword link:https://example.com/x"
    assert {*names.split()} <= styles(DOCUMENT)


@pytest.mark.parametrize(
    "url", ["javascript:alert(1)", "file:///etc/passwd", "ftp://x", "data:text/html,x"]
)
def test_only_links_to_pages_and_mail_are_links(url):
    assert not any(s.startswith("link") for s in styles(f"[x]({url})"))


def test_code_blocks_are_numbered_across_the_document():
    drawn = texts("```\na\n```\n\n- x\n  ```sh\n  b\n  ```\n")
    assert sum("copy 1" in line for line in drawn) == 1
    assert sum("copy 2" in line for line in drawn) == 1


def test_fence_that_is_not_closed_yet_is_code():
    assert any(line.fill == "code" for line in RenderedMarkdown("text\n\n```python\nx = 1", 40).lines)


def test_unknown_language_is_plain():
    assert "  x" in texts("```no-such-language\nx\n```")


def test_control_characters_are_removed():
    assert clean("a\x1b[31m\x07\x9bb\u202ec\td\n") == "a[31mbc    d\n"
    evil = (
        "x\x1b]0;title\x07\n\n```\n\x1b[2J\n```\n`\x1b[H` [\x1b](https://a\x1b.b) ![\x1b](x)\n\n"
        "| \x1b |\n|---|\n| \x9b |"
    )
    for line in RenderedMarkdown(evil, 40).lines:
        assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in line.text)
        assert not any("\x1b" in s.style for s in line.spans)
    attachments = (Attachment(name="\x1b.txt", text=""),)
    question = Question(Turn(content="\x1b[31mred", attachments=attachments))
    failed = AnswerEntry(Turn(role="assistant", status="failed", error="\x1b[1m"))
    for entry in (question, failed, Remark("\x1b", hint="\x1b"), Welcome("\x1b")):
        assert all("\x1b" not in line.text for line in entry.lines(40))


def test_wrapping_keeps_the_spans_on_their_words():
    line = Line("one two three four", (Span(4, 7, "em"), Span(8, 18, "strong")))
    pieces = line.wrap(9)
    assert [p.text for p in pieces] == ["one two", "three", "four"]
    styled = [piece.text[span.start : span.stop] for piece in pieces for span in piece.spans]
    assert styled == ["two", "three", "four"]


def test_folding_keeps_spaces_and_counts_cells():
    assert [p.text for p in Line("    ab你好c").fold(6)] == ["    ab", "你好c"]


def test_long_question_is_folded():
    entry = Question(Turn(content="\n".join(map(str, range(100)))))
    assert len(entry.lines(40)) == 18
    entry.toggle()
    assert len(entry.lines(40)) == 101


def test_answer_grows_then_settles_to_the_same():
    turn = Turn(id=3, role="assistant", status="streaming")
    entry = AnswerEntry(turn, streaming=True)
    entry.lines(60)
    for position in range(0, len(DOCUMENT), 7):
        entry.grow(DOCUMENT[position : position + 7], "")
        entry.lines(60)
    grown = list(entry.lines(60))
    entry.finish(Turn(id=3, role="assistant", content=DOCUMENT), (1, 1))
    assert entry.lines(60) == grown


def test_answer_shows_how_it_ended():
    def last(**fields):
        page = fields.pop("page", (1, 1))
        lines = AnswerEntry(Turn(role="assistant", **fields), page).lines(60)
        return [line.text.strip() for line in lines if line.text.strip()]

    assert last(content="x", status="stopped")[-1].startswith("◌ stopped")
    cut = last(content="x", status="length", stats=Stats(completion_tokens=1500))
    assert cut[-1].startswith("◌ stopped at 1,500 tokens")
    assert last(status="failed", error="it broke") == ["✗ it broke"]
    assert last(content="x", page=(2, 3))[-1] == "‹ 2/3 ›"
    assert last() == ["(empty answer)"]


def test_estimated_heights_are_near_the_drawn_ones():
    turn = Turn(role="assistant", content="word " * 600)
    entry = AnswerEntry(turn)
    estimate = entry.height(80)
    assert abs(estimate - len(entry.lines(80))) <= 0.2 * estimate + 2
