"""Markdown, well formed and not, whole and in pieces."""

import random
from collections.abc import Iterator

from hypothesis import strategies as st

#: Whatever begins, ends, continues or interrupts a block, and letters between.
SIGNS = """
# | ## | > | >> | - | -- | --- | * | ** | *** | _ | + | 1. | 12) | ``` | `` | ` | ~~~ | ~~ | === | = | |
--: | :-: | \\| | [ | ] | [ ] | [x] | ( | ) | ![ | ]( | ]: | <b> | </b> | < | > | & | &lt; | \\ | \\( | \\) |
\\[ | \\] | $ | $$ | http://a.b | https://é.example/x_y_ | mailto:a@b.c | javascript: | www. | a@b.c | : | // |
a | b c | word | 7 | é | 你好 | 👩‍🚀
""".replace("\n", " | ").split(" | ")
SIGNS += ["|", "| a | b |\n", "|--|:-:|\n", " | ", "\n", "\n", "\n", "\n\n"]
SIGNS += [" ", "  ", "    ", "\t", "\r", "\r\n"]
SIGNS += ["\0", "\x1b[1m", "\u2028", "\u202e", "\u00a0", "\ufeff", "\ud800", "\x0b", "\x0c", "\x85"]
#: Texts of Markdown's signs, well formed and not.
MARKDOWN = st.lists(st.sampled_from(SIGNS), max_size=40).map("".join)


def split(text: str, dice: random.Random) -> Iterator[str]:
    """Cut a text at random places; sometimes everywhere."""
    most = dice.choice([1, 3, 10, 40, 10_000])
    while text:
        size = dice.randint(1, most)
        yield text[:size]
        text = text[size:]
