"""The places of pictures in a prompt that a chat template renders.

Before the template runs, each mark in a message becomes a marker with the picture's number and a random
word of this process. No text of a message can forge one, and a template may move messages.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from functools import cached_property

import msgspec

from edgeinfer.errors import InvalidRequestError
from edgeinfer.runtime.pictures import PICTURE_MARK, SHOWN
from edgeinfer.runtime.requests import Message


class PicturePlaces:
    """Put markers into messages, and find them in a rendered prompt. Any thread."""

    @cached_property
    def _word(self) -> str:
        return secrets.token_hex(8)

    @cached_property
    def _marker(self) -> re.Pattern[str]:
        return re.compile(rf"picture{self._word}n(\d+)[be]")

    def marked(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Replace the marks of pictures by markers. Raises InvalidRequestError."""
        numbers = iter(range(sum(len(message.pictures) for message in messages)))
        made = []
        for message in messages:
            if message.pictures:
                n_places = message.content.count(PICTURE_MARK)
                if n_places != len(message.pictures):
                    raise InvalidRequestError(
                        f"a message has {len(message.pictures)} pictures at {n_places} places",
                        param="messages",
                    )

                def marker(mark: re.Match[str]) -> str:
                    return f"picture{self._word}n{next(numbers)}{'e' if mark.start() else 'b'}"

                content = re.sub(PICTURE_MARK, marker, message.content)
                message = msgspec.structs.replace(message, content=content)
            made.append(message)
        return tuple(made)

    def split(
        self, prompt: str, pictures: Sequence[bytes], *, is_tight: bool = False
    ) -> Iterator[str | bytes]:
        """Yield the texts and pictures of a rendered prompt, in order. Raises InvalidRequestError.

        `is_tight` leaves out the space before a picture that begins a message.
        """
        end = 0
        seen = []
        for found in self._marker.finditer(prompt):
            text = prompt[end : found.start()]
            yield text.removesuffix(" ") if is_tight and found[0].endswith("b") else text
            seen.append(int(found[1]))
            yield pictures[seen[-1]]
            end = found.end()
        if sorted(seen) != list(range(len(pictures))):
            raise InvalidRequestError(
                f"the chat template renders {len(seen)} of {len(pictures)} pictures", param="messages"
            )
        yield prompt[end:]

    def shown(self, prompt: str) -> str:
        """Return a rendered prompt as a person reads it."""
        return self._marker.sub(SHOWN, prompt)
