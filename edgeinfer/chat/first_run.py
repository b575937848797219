"""The first run: three models that suit this machine are offered, and the one taken is remembered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from edgeinfer.chat.commands.settings import save
from edgeinfer.chat.opening import Launch
from edgeinfer.chat.shelf import Shelved, size_words
from edgeinfer.errors import DownloadError, OfflineError
from edgeinfer.models.fits import FirstRunChoice, first_run_choices
from edgeinfer.models.progress import PullProgress
from edgeinfer.platform.places import DEFAULT_MODEL


def choices(launch: Launch, rows: Sequence[Shelved]) -> list[FirstRunChoice]:
    """Return what to offer where no model is here and none was named; takes 0.2 s."""
    if launch.model != launch.host.config.default_model or any(row.pulled for row in rows):
        return []
    return first_run_choices()


def described(choice: FirstRunChoice) -> str:
    """Write `comfortable · 812 MB · Apache-2.0 · about 24 tokens/s`."""
    size = size_words(choice.size_bytes)
    return f"{choice.role} · {size} · {choice.licence} · about {choice.tokens_per_s:.0f} tokens/s"


def fetch(
    name: str, report: Callable[[PullProgress], None], cancel: threading.Event | None = None
) -> tuple[str, str]:
    """Pull the model that was chosen, or the default one if its source cannot be reached.

    What was pulled becomes `default-model`. Return its name, and why it is another, "" if it is not.
    Raises what `pull` raises.
    """
    from edgeinfer.models.pull import pull  # 30 ms: hashing, and what the network needs

    note = ""
    try:
        pulled = pull(name, report, cancel)
    except OfflineError:
        raise
    except DownloadError as error:
        if name == DEFAULT_MODEL:
            raise
        note = f"{name} could not be fetched: {error.message}. {DEFAULT_MODEL} is used instead."
        pulled = pull(DEFAULT_MODEL, report, cancel)
    save(("default-model",), pulled.name)
    return pulled.name, note
