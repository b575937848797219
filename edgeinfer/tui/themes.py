"""Two calm themes of our own, beside all of Textual's."""

from __future__ import annotations

from typing import Any

from textual.theme import Theme

#: Each colour of the dark and of the light theme; `border` and `dim` are those of lines.
_COLOURS = """
    primary     #7fa8d1  #2c6494
    secondary   #8fb3a0  #477a63
    accent      #d8a65e  #9a5b0c
    warning     #d8a65e  #9a5b0c
    error       #d9807a  #ab3a34
    success     #94b878  #4a7629
    foreground  #d4d7dd  #2a2e36
    background  #15171c  #fbfaf7
    surface     #1b1e25  #f3f1ec
    panel       #22262f  #e9e6df
    border      #4a5568  #a9a598
    dim         #2b303b  #d9d5cb
"""


def _theme(name: str, column: int, *, dark: bool, selection: str) -> Theme:
    rows = (line.split() for line in _COLOURS.strip().splitlines())
    colours: dict[str, Any] = {row[0]: row[column] for row in rows}
    border, dim = colours.pop("border"), colours.pop("dim")
    primary, background = colours["primary"], colours["background"]
    variables = {
        "border": border,
        "border-blurred": dim,
        "footer-key-foreground": primary,
        "input-selection-background": f"{primary} {selection}",
        "scrollbar": dim,
        "scrollbar-hover": border,
        "scrollbar-active": primary,
    }
    for state in ("", "-hover", "-active"):
        variables[f"scrollbar-background{state}"] = background
    return Theme(name=name, dark=dark, variables=variables, **colours)


DARK = _theme("edgeinfer-dark", 1, dark=True, selection="30%")
LIGHT = _theme("edgeinfer-light", 2, dark=False, selection="25%")
