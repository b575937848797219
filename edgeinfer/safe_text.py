"""Text that is safe on a terminal: output of models, files and users is data."""

from __future__ import annotations

#: Control characters that a terminal would obey: C0 and C1 without tab and newline, surrogates that
#: cannot be written, and what changes the direction of the text around it.
_OBEYED = dict.fromkeys(
    (
        *(code for code in range(0x20) if code not in (0x09, 0x0A)),
        *range(0x7F, 0xA0),
        *(0x200E, 0x200F),
        *range(0x202A, 0x202F),
        *range(0x2066, 0x206A),
        *range(0xD800, 0xE000),
    )
)


def without_controls(text: str) -> str:
    """Remove what a terminal would obey from `text`; keep tabs and newlines."""
    return text.translate(_OBEYED)
