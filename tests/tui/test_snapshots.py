"""Every screen as SVG: 80×24 and 120×40, dark and light.

`pytest --snapshot-update` accepts what is on show now; look first.
"""

import pytest
from fixed_chat import NOON, OFFERED, make_app
from scenes import SCENES

from edgeinfer.config.config_file import ChatConfig
from edgeinfer.tui.screens import model_picker

LOOKS = [
    (size, theme) for size in ((80, 24), (120, 40)) for theme in ("edgeinfer-dark", "edgeinfer-light")
]


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
@pytest.mark.parametrize(
    ("size", "theme"), LOOKS, ids=[f"{s[0]}x{s[1]}-{t.removeprefix('edgeinfer-')}" for s, t in LOOKS]
)
def test_a_screen_is_drawn_as_before(scene, size, theme, snap_compare, tmp_path, monkeypatch):
    made = scene()
    monkeypatch.setattr(model_picker, "list_choices", lambda warm=(): made.shelf)
    monkeypatch.setattr("edgeinfer.chat.model_choices.first_run_choices", lambda: OFFERED)
    app = make_app(
        tmp_path, made.host, config=ChatConfig(theme=theme), clock=lambda: NOON, **made.fields
    )
    assert snap_compare(app, terminal_size=size, run_before=made.prepare)


def test_no_color_leaves_weights_and_grey(snap_compare, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    made = SCENES["answered"]()
    app = make_app(tmp_path, made.host, clock=lambda: NOON)
    assert app.no_color
    assert snap_compare(app, run_before=made.prepare)
