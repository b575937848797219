"""Markdown of answers: pieces of any size give the same blocks as the whole text."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_markdown import MARKDOWN, split

from edgeinfer.chat import markdown
from edgeinfer.chat.markdown import GrowingMarkdown, parser
from edgeinfer.safe_text import without_controls


def flat(blocks):
    return [
        (token.type, token.content, token.info, [str(c.as_dict()) for c in token.children or ()])
        for block in blocks
        for token in block
    ]


def whole(text):
    settled, last = GrowingMarkdown().add(text)
    return flat([*settled, *last])


def grow(text, dice):
    document = GrowingMarkdown()
    done, last = [], []
    for piece in split(text, dice):
        settled, last = document.add(piece)
        done += settled
    return flat([*done, *last])


@settings(max_examples=500, deadline=None)
@given(MARKDOWN, st.randoms(use_true_random=False))
def test_any_split_gives_the_blocks_of_the_whole(text, dice):
    assert grow(text, dice) == whole(text)


LONG = st.sampled_from(["word " * 15, "x" * 150, "```\n", "~~~\n"])


@settings(max_examples=300, deadline=None)
@given(st.lists(MARKDOWN | LONG), st.randoms(use_true_random=False))
def test_blocks_beyond_the_limits_are_cut_alike(parts, dice):
    text = "".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(markdown, "_MAX_BLOCK", 60)
        patch.setattr(markdown, "_MAX_CODE", 200)
        assert grow(text, dice) == whole(text)


@settings(max_examples=500, deadline=None)
@example("```| a | b |\n-|--|:-:|\n")
@example("~~~\nword\n  ")
@given(MARKDOWN)
def test_a_text_within_the_limits_has_the_blocks_of_the_parser(text):
    plain = without_controls(text)
    assert whole(text) == flat([parser().parse(plain)])
