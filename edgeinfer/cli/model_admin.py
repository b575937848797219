"""Pull, name, copy and remove models for the endpoint, as the commands do."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from edgeinfer.host import Host

if TYPE_CHECKING:
    from edgeinfer.models.progress import OnProgress


class ModelShelf:
    """The `Shelf` of `edgeinfer serve`. Any thread.

    What changes models is imported when somebody asks: 60 ms that few endpoints need.
    """

    def __init__(self, host: Host) -> None:
        self._host = host

    def pull(self, text: str, report: OnProgress, cancel: threading.Event) -> None:
        from edgeinfer.models import pull

        pull.pull(text, report, cancel)

    def create(self, name: str, path: str, report: OnProgress, cancel: threading.Event) -> None:
        from edgeinfer.models import pull

        pull.pull(path, report, cancel, pull.PullOptions(name=name, in_place=True))

    def copy(self, source: str, name: str) -> None:
        from edgeinfer.models import remove

        remove.copy(source, name)

    def remove(self, name: str) -> None:
        from edgeinfer.cli.verbs import rm

        rm.remove_model(name, self._host)
