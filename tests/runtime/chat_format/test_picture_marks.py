"""Texts around pictures reach the prompt whole, whatever characters they have."""

import random
from collections.abc import Callable
from itertools import groupby

from edgeinfer.media.pictures import join_parts
from edgeinfer.runtime.chat_format.chat_format import PictureMarkers
from edgeinfer.runtime.requests import Message


def test_texts_around_pictures_arrive_whole(cases: Callable[[int], int]) -> None:
    markers, rng = PictureMarkers(), random.Random(5)
    for _ in range(cases(150)):
        parts: list[str | bytes] = [
            rng.choice([b"1", b"2", "".join(rng.choices("a\ufdd1\ufdd2\ufdd3\ufdd0", k=5))])
            for _ in range(rng.randint(1, 6))
        ]
        content, pictures = join_parts(parts)
        (message,) = markers.insert([Message(role="user", content=content, pictures=pictures)])
        texts_and_pictures = [part for part in markers.split(message.content, pictures) if part]
        joined = [
            part
            for is_text, group in groupby(parts, lambda part: isinstance(part, str))
            for part in (["".join(group)] if is_text else group)  # type: ignore[arg-type]
        ]
        assert texts_and_pictures == joined
