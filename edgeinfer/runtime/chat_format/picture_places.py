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
                texts = message.content.split(PICTURE_MARK)
                if len(texts) != len(message.pictures) + 1:
                    raise InvalidRequestError(
                        f"a message has {len(message.pictures)} pictures at {len(texts) - 1} places",
                        param="messages",
                    )
                begins = [texts[0] == "", *(False for _ in texts[2:])]
                content = texts[0] + "".join(
                    f"picture{self._word}n{next(numbers)}{'b' if first else 'e'}{text}"
                    for first, text in zip(begins, texts[1:], strict=True)
                )
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
