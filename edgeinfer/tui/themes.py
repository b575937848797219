"""Two calm themes of our own, beside all of Textual's."""

from __future__ import annotations

from textual.theme import Theme

DARK = Theme(
    name="edgeinfer-dark",
    primary="#7fa8d1",
    secondary="#8fb3a0",
    accent="#d8a65e",
    warning="#d8a65e",
    error="#d9807a",
    success="#94b878",
    foreground="#d4d7dd",
    background="#15171c",
    surface="#1b1e25",
    panel="#22262f",
    dark=True,
    variables={
        "border": "#4a5568",
        "border-blurred": "#2b303b",
        "footer-key-foreground": "#7fa8d1",
        "input-selection-background": "#7fa8d1 30%",
        "scrollbar": "#2b303b",
        "scrollbar-hover": "#4a5568",
        "scrollbar-active": "#7fa8d1",
        "scrollbar-background": "#15171c",
        "scrollbar-background-hover": "#15171c",
        "scrollbar-background-active": "#15171c",
    },
)

LIGHT = Theme(
    name="edgeinfer-light",
    primary="#2c6494",
    secondary="#477a63",
    accent="#9a5b0c",
    warning="#9a5b0c",
    error="#ab3a34",
    success="#4a7629",
    foreground="#2a2e36",
    background="#fbfaf7",
    surface="#f3f1ec",
    panel="#e9e6df",
    dark=False,
    variables={
        "border": "#a9a598",
        "border-blurred": "#d9d5cb",
        "footer-key-foreground": "#2c6494",
        "input-selection-background": "#2c6494 25%",
        "scrollbar": "#d9d5cb",
        "scrollbar-hover": "#a9a598",
        "scrollbar-active": "#2c6494",
        "scrollbar-background": "#fbfaf7",
        "scrollbar-background-hover": "#fbfaf7",
        "scrollbar-background-active": "#fbfaf7",
    },
)
