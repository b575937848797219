"""The models that the page offers and pulls. A pull goes on when its page is closed."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from edgeinfer.errors import EdgeInferError
from edgeinfer.models.progress import progress_text
from edgeinfer.server.logs import Log
from edgeinfer.server.model_pool import ModelAdministrator
from edgeinfer.server.problems import from_error
from edgeinfer.server.pulling import reports_of, source_of
from edgeinfer.server.web import wire

if TYPE_CHECKING:
    from edgeinfer.chat.model_choices import ModelChoice


class Pulls:
    """The pulls of one endpoint. Lives on the event loop."""

    def __init__(self, admin: ModelAdministrator, log: Log) -> None:
        self._admin = admin
        self._log = log
        #: Running and failed pulls by name.
        self.now: dict[str, wire.Pull] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str) -> None:
        """Pull a model unless it is being pulled. Raises InvalidRequestError, UnknownModelError."""
        source = source_of(name)
        if name not in self._tasks:
            self.now[name] = wire.Pull(name=name)
            self._tasks[name] = asyncio.create_task(self._pull(name, source))

    def stop(self, name: str) -> None:
        """Stop a pull, or forget a failed one; what was fetched is kept."""
        self.now.pop(name, None)
        if (task := self._tasks.pop(name, None)) is not None:
            task.cancel()

    async def _pull(self, name: str, source: str) -> None:
        failure = ""
        try:
            pulling = reports_of(lambda report, cancel: self._admin.pull(source, report, cancel))
            async with aclosing(pulling) as reports:
                async for now in reports:
                    total = now.total_bytes or 0
                    self.now[name] = wire.Pull(
                        name=name, text=progress_text(now), done=now.done_bytes, total=total
                    )
        except EdgeInferError as error:
            failure = from_error(error).message
        except Exception as error:  # noqa: BLE001  the page says that it failed, the log says why
            self._log.error("internal", error)
            failure = "An internal error; the endpoint's log has it."
        del self._tasks[name], self.now[name]
        if failure:
            self.now[name] = wire.Pull(name=name, text=failure, failed=True)


def offered() -> list[ModelChoice]:
    """List the catalogue's models that are not here."""
    from edgeinfer.chat.model_choices import list_choices  # 30 ms, once a page shows its list of models

    return [one for one in list_choices() if not (one.pulled or one.store)]
