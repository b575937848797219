"""Chat formats of the recorded templates, with a vocabulary that has the markers of their families."""

import functools
import json
from pathlib import Path
from typing import Any

from edgeinfer.runtime.chat_format.chat_format import ChatFormat, TemplateFacts, load_chat_format

TEMPLATES = Path(__file__).parents[1] / "runtime/chat_format/templates"
FAMILY_TEMPLATES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


class MarkerVocab:
    """A vocabulary whose control tokens are the families' markers: what their models have."""

    eos_tokens = (2,)
    n_vocab = 100
    markers = "[TOOL_CALLS] [ARGS] [THINK] [/THINK] <|python_tag|> <|tool_call|> <|/tool_call|>".split()

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = False
    ) -> list[int]:
        if parse_special and text in self.markers:
            return [10 + self.markers.index(text)]
        return [50] * max(2, len(text))

    def is_control(self, token: int) -> bool:
        return token < 50

    def control_tokens(self) -> dict[str, int]:
        return {text: 10 + i for i, text in enumerate(self.markers)}

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return b"x"


def template_text(name: str) -> str:
    """Return the recorded template of a family."""
    return (TEMPLATES / f"{name}.jinja").read_text()


@functools.cache
def load_format(name: str = "", vocab: Any = None, **facts: Any) -> ChatFormat:
    """Load the format of a family's template; `facts` are other fields of `TemplateFacts`."""
    usual = {"template": template_text(name) if name else "", "architecture": "llama", "name": name}
    usual |= {"bos_text": "<s>", "eos_text": "</s>", "vocab": vocab or MarkerVocab()}
    return load_chat_format(TemplateFacts(**usual | facts))


def json_or_text(text: str) -> Any:
    """Parse JSON; a text that is none stays."""
    try:
        return json.loads(text)
    except ValueError:
        return text
