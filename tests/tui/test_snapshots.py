"""Every screen as SVG, in one size and theme each.

`pytest --snapshot-update` accepts the new drawings; look at them first.
"""

import pytest
from fixed_chat import NOON, OFFERED, make_app
from scenes import SCENES

from edgeinfer.config.config_file import ChatConfig
from edgeinfer.tui.screens import model_picker

LOOKS = {
    "answer_question": ((120, 40), "dark"),
    "completing": ((80, 24), "dark"),
    "full": ((80, 24), "light"),
    "models": ((120, 40), "light"),
    "first": ((80, 24), "dark"),
    "searching": ((80, 24), "light"),
    "help": ((120, 40), "dark"),
}


@pytest.mark.parametrize(
    ("scene", "size", "theme"),
    [(scene, *look) for scene, look in LOOKS.items()],
    ids=[f"{w}x{h}-{theme}-{scene}" for scene, ((w, h), theme) in LOOKS.items()],
)
def test_a_screen_is_drawn_as_before(scene, size, theme, snap_compare, tmp_path, monkeypatch):
    scene_app = SCENES[scene]()
    monkeypatch.setattr(model_picker, "list_choices", lambda warm=(): scene_app.shelf)
    monkeypatch.setattr("edgeinfer.chat.model_choices.first_run_choices", lambda: OFFERED)
    config = ChatConfig(theme=f"edgeinfer-{theme}")
    app = make_app(tmp_path, scene_app.host, config=config, clock=lambda: NOON)
    assert snap_compare(app, terminal_size=size, run_before=scene_app.prepare)


def test_no_color_leaves_weights_and_grey(snap_compare, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    scene_app = SCENES["answer_question"]()
    app = make_app(tmp_path, scene_app.host, clock=lambda: NOON)
    assert app.no_color
    assert snap_compare(app, run_before=scene_app.prepare)
