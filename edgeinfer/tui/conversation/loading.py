"""Loads a model while the user types: in a thread, with its progress in the status line."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from textual.message import Message

from edgeinfer.chat.launch import Engines
from edgeinfer.errors import EdgeInferError, EngineClosedError
from edgeinfer.runtime.interface import Engine


class Loader:
    """Loads a model; a later load replaces an earlier. Its thread `post`s `Loaded` or `Failed`."""

    class Loaded(Message):
        """A model is there."""

        def __init__(self, serial: int, model: str, engine: Engine) -> None:
            super().__init__()
            self.serial = serial
            self.model = model
            self.engine = engine

    class Failed(Message):
        """A model could not be loaded."""

        def __init__(self, serial: int, model: str, error: EdgeInferError) -> None:
            super().__init__()
            self.serial = serial
            self.model = model
            self.error = error

    def __init__(self, engines: Engines, post: Callable[[Message], object]) -> None:
        self._engines = engines
        self._post = post
        self.progress = ""
        self._model = ""
        self._serial = 0

    @property
    def is_first(self) -> bool:
        """Whether the model in use is the one that this launch was for."""
        return self._engines.is_first

    def start(self, model: str, n_ctx: int | None = None) -> None:
        """Load `model` unless it is being loaded."""
        if self.progress and n_ctx is None and model == self._model:
            return
        self._model = model
        self._serial += 1
        self.progress = f"loading {model}…"
        # not a worker of Textual's: leaving would wait for it
        threading.Thread(
            target=self._load, args=(model, n_ctx, self._serial), name=f"load {model}", daemon=True
        ).start()

    def finish(self, ended: Loaded | Failed) -> bool:
        """Return whether the load that ended is the last one asked for; then nothing is loading."""
        if ended.serial != self._serial:
            return False
        self.progress = ""
        return True

    def _load(self, model: str, n_ctx: int | None, serial: int) -> None:
        def progress(stage: str, fraction: float | None) -> None:
            done = "" if fraction is None else f" {fraction:.0%}"
            if serial == self._serial:
                self.progress = f"{stage}{done}"

        ended: Loader.Loaded | Loader.Failed
        try:
            ended = self.Loaded(serial, model, self._engines.get(model, n_ctx, progress))
        except OSError as failure:  # the launcher that would have started a worker is gone
            error = EngineClosedError(f"{model} cannot be started: {failure}")
            ended = self.Failed(serial, model, error)
        except EdgeInferError as failure:
            ended = self.Failed(serial, model, failure)
        with contextlib.suppress(RuntimeError):  # the app has ended meanwhile
            self._post(ended)

    def close(self) -> None:
        """Free what is loaded."""
        self._serial += 1
        self._engines.close()
