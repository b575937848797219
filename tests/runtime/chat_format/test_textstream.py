"""Whole characters, and nothing of a stop string, however the bytes are cut."""

import random

import pytest

from edgeinfer.runtime.chat_format.detokenizer import TextStream

TEXT = "Grüße 世界 🌍🏳️‍🌈 end of the STOPline"


def cut(data: bytes, rng: random.Random) -> list[bytes]:
    places = sorted(rng.sample(range(1, len(data)), rng.randrange(1, len(data) - 1)))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


@pytest.mark.parametrize("seed", range(50))
def test_any_cut_gives_the_same_text(seed: int) -> None:
    stream = TextStream()
    pieces = [stream.feed(fragment) for fragment in cut(TEXT.encode(), random.Random(seed))]
    assert "".join(pieces) + stream.finish() == TEXT
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("seed", range(50))
def test_any_cut_stops_at_the_same_place(seed: int) -> None:
    stream = TextStream(["never", "STOP", "STO"])
    pieces = cut(TEXT.encode(), random.Random(seed))
    shown = "".join(map(stream.feed, pieces)) + stream.finish()
    assert shown == TEXT[: TEXT.index("STOP")]
    assert stream.stopped_by in ("STOP", "STO")


def test_the_longer_stop_wins_where_both_begin() -> None:
    stream = TextStream(["STO", "STOP"])
    assert stream.feed(b"a STOP b") == "a "
    assert stream.stopped_by == "STOP"


@pytest.mark.parametrize(
    ("stops", "fed", "shown"),
    [
        (["###"], [b"a ##", b" b"], ["a ", "## b", ""]),
        (["###"], [b"a ##"], ["a ", "##"]),
        (["x"], [b"abxcd", b"more"], ["ab", "", ""]),
        ([], [b"\xc3"], ["", ""]),  # an unfinished character is dropped
        ([], [b"a\xffb"], ["a\ufffdb", ""]),
    ],
)
def test_text_is_held_until_it_is_certain(stops: list[str], fed: list[bytes], shown: list[str]) -> None:
    stream = TextStream(stops)
    assert [*map(stream.feed, fed), stream.finish()] == shown
