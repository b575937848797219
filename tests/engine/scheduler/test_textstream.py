"""Whole characters, and nothing of a stop string, however the bytes are cut."""

from __future__ import annotations

import random

import pytest

from edgeinfer.runtime.sampling.output import TextStream

TEXT = "Grüße 世界 🌍🏳️‍🌈 end of the STOPline"


def cut(data: bytes, rng: random.Random) -> list[bytes]:
    places = sorted(rng.sample(range(1, len(data)), rng.randrange(1, len(data) - 1)))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


@pytest.mark.parametrize("seed", range(50))
def test_any_cut_gives_the_same_text(seed: int) -> None:
    stream = TextStream()
    pieces = [stream.feed(part) for part in cut(TEXT.encode(), random.Random(seed))]
    assert "".join(pieces) + stream.finish() == TEXT
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("seed", range(50))
def test_any_cut_stops_at_the_same_place(seed: int) -> None:
    stream = TextStream(["never", "STOP", "STO"])
    shown = (
        "".join(stream.feed(part) for part in cut(TEXT.encode(), random.Random(seed))) + stream.finish()
    )
    assert shown == TEXT[: TEXT.index("STOP")]
    assert stream.stopped_by in ("STOP", "STO")


def test_the_longer_stop_wins_where_both_begin() -> None:
    stream = TextStream(["STO", "STOP"])
    assert stream.feed(b"a STOP b") == "a "
    assert stream.stopped_by == "STOP"


def test_a_false_beginning_is_given_back() -> None:
    stream = TextStream(["###"])
    assert stream.feed(b"a ##") == "a "
    assert stream.is_holding
    assert stream.feed(b" b") == "## b"
    assert not stream.is_holding


def test_held_text_is_emitted_at_the_end() -> None:
    stream = TextStream(["###"])
    assert stream.feed(b"a ##") + stream.finish() == "a ##"


def test_an_unfinished_character_is_dropped_at_the_end() -> None:
    stream = TextStream()
    assert stream.feed("ü".encode()[:1]) == ""
    assert stream.is_holding
    assert stream.finish() == ""


def test_invalid_bytes_become_replacement_characters() -> None:
    assert TextStream().feed(b"a\xffb") == "a\ufffdb"


def test_nothing_comes_after_the_stop() -> None:
    stream = TextStream(["x"])
    assert stream.feed(b"abxcd") == "ab"
    assert stream.feed(b"more") == ""
    assert stream.finish() == ""
