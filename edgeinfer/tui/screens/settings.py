"""Settings: theme, sampling preset, system prompt, and every key; changes go to config.toml."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from edgeinfer.chat import presets
from edgeinfer.chat.commander import Commander
from edgeinfer.chat.launch import Launch
from edgeinfer.chat.session import ChatSession
from edgeinfer.config.config_file import save
from edgeinfer.error_text import hint
from edgeinfer.errors import EdgeInferError
from edgeinfer.tui.bindings import BY_ID, HEADINGS, KEYS, shown
from edgeinfer.tui.screens.dialogs import ChoiceScreen, sheet
from edgeinfer.tui.textual_internals import keymap


class KeyScreen(ModalScreen[str | None]):
    """The next key that is pressed is the answer; Esc leaves."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name_of = name

    def compose(self) -> ComposeResult:
        with sheet(BY_ID[self._name_of].label, "Esc leaves it as it is", small=True):
            yield Static("Press the new key.", classes="text")

    def on_key(self, event: events.Key) -> None:
        event.stop()
        event.prevent_default()
        self.dismiss(None if event.key == "escape" else event.key)


class SettingsScreen(ModalScreen[None]):
    """One list; Enter changes what is chosen."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,f4", "dismiss", "Leave", show=False)]

    def __init__(self, launch: Launch, session: ChatSession, commander: Commander) -> None:
        super().__init__()
        self._launch = launch
        self._session = session
        self._commander = commander

    def compose(self) -> ComposeResult:
        with sheet("Settings", "Enter changes · Esc leaves"):
            yield OptionList(id="settings")
            yield Static("", classes="detail", markup=False)

    def on_mount(self) -> None:
        self._show()
        self.query_one(OptionList).focus()

    def _show(self) -> None:
        listed = self.query_one(OptionList)
        at = listed.highlighted
        listed.clear_options()
        listed.add_options(self._options())
        listed.highlighted = at if at is not None else 0

    def _options(self) -> list[Option | None]:
        conversation = self._session.conversation
        prompt = " ".join(conversation.system_prompt.split())
        options: list[Option | None] = [
            _option("theme", "Theme", self.app.theme),
            _option("preset", "Sampling", presets.describe(conversation.sampling)),
            _option(
                "prompt",
                "System prompt",
                (prompt[:50] + "…" if len(prompt) > 50 else prompt) or "the model's own",
            ),
            _option("read-ahead", "Read ahead", "on" if self._launch.config.read_ahead else "off"),
        ]
        rebound = keymap(self.app)
        for where, heading in HEADINGS.items():
            options += [None, Option(Content.styled(heading, "bold $primary"), disabled=True)]
            options += [
                _option(f"key:{k.id}", k.label, shown(rebound.get(k.id, k.keys)))
                for k in KEYS
                if k.where == where
            ]
        return options

    @on(OptionList.OptionHighlighted)
    def _explain(self, event: OptionList.OptionHighlighted) -> None:
        kind, _, name = (event.option.id or "").partition(":")
        words = {
            "theme": "Colours. Any of Textual's themes, and two of our own.",
            "preset": "How freely words are chosen in this conversation. /set changes one option.",
            "read-ahead": "The model reads what you type, attach or open before you ask.",
            "prompt": "What the model is told first. /system TEXT sets it, /save-system NAME keeps it.",
        }.get(kind, "")
        self.query_one(".detail", Static).update(
            f"{BY_ID[name].tooltip}. In config.toml: {name}" if kind == "key" else words
        )

    @on(OptionList.OptionSelected)
    def _change(self, event: OptionList.OptionSelected) -> None:
        kind, _, name = (event.option.id or "").partition(":")
        if kind == "key":
            self.app.push_screen(KeyScreen(name), lambda key: self._bind(name, key))
        elif kind == "theme":
            choices = [
                (t, t, "dark" if self.app.available_themes[t].dark else "light")
                for t in sorted(self.app.available_themes)
            ]
            choices.sort(key=lambda c: not c[0].startswith("edgeinfer"))
            self.app.push_screen(ChoiceScreen("Theme", "", choices), self._theme)
        elif kind == "preset":
            found = self._commander.presets
            self.app.push_screen(
                ChoiceScreen("Sampling", "", [(n, n, presets.describe(v)) for n, v in found.items()]),
                self._preset,
            )
        elif kind == "prompt":
            found_prompts = [
                (n, n, " ".join(t.split())[:50]) for n, t in self._commander.prompts.items()
            ]
            none = ("none", "none", "the model's own")
            self.app.push_screen(
                ChoiceScreen("System prompt", "", [none, *found_prompts]), self._prompt
            )

        elif kind == "read-ahead":
            wanted = not self._launch.config.read_ahead
            self._launch.config = msgspec.structs.replace(self._launch.config, read_ahead=wanted)
            self._save(("chat", "read-ahead"), wanted)

    def _theme(self, name: str | None) -> None:
        if name:
            self.app.theme = name
            self._save(("chat", "theme"), name)

    def _preset(self, name: str | None) -> None:
        if name:
            self._session.set(sampling=dict(self._commander.presets[name]))
            self._show()

    def _prompt(self, name: str | None) -> None:
        if name:
            self._session.set(system_prompt="" if name == "none" else self._commander.prompts[name])
            self._show()

    def _bind(self, name: str, key: str | None) -> None:
        if key is None:
            return
        taken = next(
            (
                k
                for k in KEYS
                if k.id != name and k.where == BY_ID[name].where and key in self._keys_of(k.id)
            ),
            None,
        )
        if taken is not None:
            self.notify(f"{shown(key)} is “{taken.label}” already.", severity="warning", markup=False)
            return
        self.app.update_keymap({name: key})
        self._save(("chat", "keys", name), key)

    def _keys_of(self, name: str) -> list[str]:
        return keymap(self.app).get(name, BY_ID[name].keys).split(",")

    def _save(self, keys: tuple[str, ...], value: str | bool) -> None:
        try:
            save(keys, value)
        except EdgeInferError as error:
            self.notify(f"{error.message}\n{hint(error)}".strip(), severity="warning", markup=False)
        self._show()


def _option(name: str, label: str, value: str) -> Option:
    return Option(Content.assemble(f"  {label:<20}", (value, "$accent")), id=name)
