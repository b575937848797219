"""What a type is chosen for."""

from __future__ import annotations

from typing import Literal

#: "auto" is a question of 1,000 tokens and an answer of 200.
Purpose = Literal["auto", "prefill", "decode", "quality", "size"]
#: The word that asks for a choice where a type is named.
AUTO = "AUTO"
