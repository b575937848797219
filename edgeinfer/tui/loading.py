"""Getting a model into memory while the user types: in a thread, with its progress in the status
line.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from textual._context import NoActiveAppError

from edgeinfer.chat.opening import Launch
from edgeinfer.errors import EdgeInferError, EngineClosedError, ModelNotPulledError
from edgeinfer.runtime.interface import Engine

if TYPE_CHECKING:
    from edgeinfer.tui.screens.chat import ChatScreen


class Loading:
    """At most one load at a time; a later one takes an earlier one's place. `words` is "" when nothing
    is loading.
    """

    def __init__(self, screen: ChatScreen, launch: Launch) -> None:
        self._screen = screen
        self._engines = launch.engines()
        self.words = ""
        self._model = ""
        self._serial = 0

    def start(self, model: str, n_ctx: int | None = None) -> None:
        """Load `model` unless it is being loaded."""
        if self.words and n_ctx is None and model == self._model:
            return
        self._model = model
        self._serial += 1
        serial = self._serial
        self.words = f"loading {model}…"
        self._screen.refresh_status()
        # not a worker of Textual's: leaving would wait for it
        threading.Thread(
            target=self._load, args=(model, n_ctx, serial), name=f"load {model}", daemon=True
        ).start()

    def _load(self, model: str, n_ctx: int | None, serial: int) -> None:
        """In the thread."""

        def progress(stage: str, fraction: float | None) -> None:
            done = "" if fraction is None else f" {fraction:.0%}"
            self.words = f"{stage}{done}" if serial == self._serial else self.words

        try:
            engine = self._engines.get(model, n_ctx, progress)
        except OSError as error:  # the launcher that would have started a worker is gone
            self._say(
                self._failed, model, EngineClosedError(f"{model} cannot be started: {error}"), serial
            )
        except EdgeInferError as error:
            self._say(self._failed, model, error, serial)
        else:
            self._say(self._loaded, model, engine, serial)

    def _say(self, tell: Callable[..., None], *arguments: object) -> None:
        """In the app's thread, unless the app has ended meanwhile."""
        with contextlib.suppress(RuntimeError, NoActiveAppError):
            if self._screen.is_running:
                self._screen.app.call_from_thread(tell, *arguments)

    def _loaded(self, model: str, engine: Engine, serial: int) -> None:
        if serial != self._serial:
            return
        screen, self.words = self._screen, ""
        session = screen.session
        session.engine = engine
        if session.conversation.model != model:
            session.set(model=model)
        screen.attaching.show()
        screen.refresh_status()
        if screen.unanswered:
            screen.answer_question()

    def _failed(self, model: str, error: EdgeInferError, serial: int) -> None:
        if serial != self._serial:
            return
        screen, self.words = self._screen, ""
        screen.refresh_status()
        unsent = screen.session.head if screen.unanswered else None
        screen.unanswered = False
        if isinstance(error, ModelNotPulledError):
            screen.front.offer_pull(model)
        else:
            screen.trouble(error, unsent.content if unsent else "")

    def close(self) -> None:
        """Free what is loaded."""
        self._serial += 1
        self._engines.close()
