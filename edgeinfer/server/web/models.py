"""List and pull models for the chat page. A pull continues if the page is closed."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing

from edgeinfer.errors import EdgeInferError
from edgeinfer.models.catalog import Model
from edgeinfer.models.fits import Estimator, Fit
from edgeinfer.models.progress import progress_text
from edgeinfer.models.store import list_pulled
from edgeinfer.server.endpoint import Endpoint
from edgeinfer.server.model_pool import ModelAdministrator
from edgeinfer.server.problems import from_error
from edgeinfer.server.pulling import reports_of, source_of
from edgeinfer.server.web import wire
from edgeinfer.units import format_bytes


class Pulls:
    """Runs the pulls that users of the page request. Not thread-safe: use it on the event loop."""

    def __init__(self, admin: ModelAdministrator, endpoint: Endpoint) -> None:
        self._admin = admin
        self._endpoint = endpoint
        #: Running and failed pulls by name.
        self.now: dict[str, wire.Pull] = {}
        self._stops: dict[str, threading.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, name: str, key: str) -> None:
        """Start pulling the model `name`, unless it is being pulled.

        Until the pull ends, it counts as a running request of the API key named `key`. Raises
        InvalidRequestError if clients may not pull `name`, and what `Endpoint.admit_request` raises.
        """
        source = source_of(name)
        if name not in self._stops:
            self._endpoint.admit_request(key)
            self.now[name] = wire.Pull(name=name)
            stop = self._stops[name] = threading.Event()
            task = asyncio.create_task(self._pull(name, source, key, stop))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def stop(self, name: str) -> None:
        """Stop pulling `name` but keep the downloaded data; remove a failed pull from the list."""
        if (stop := self._stops.get(name)) is None:
            self.now.pop(name, None)
        else:  # the pull stays listed: until it ends, no other pull of the model can start
            stop.set()
            self.now[name] = wire.Pull(name=name, text="stopping")

    async def _pull(self, name: str, source: str, key: str, stop: threading.Event) -> None:
        failure = ""
        try:
            pulling = reports_of(lambda report, _: self._admin.pull(source, report, stop))
            async with aclosing(pulling) as reports:
                async for now in reports:
                    total = now.total_bytes or 0
                    if not stop.is_set():
                        text, done = progress_text(now), now.done_bytes
                        self.now[name] = wire.Pull(name=name, text=text, done=done, total=total)
        except EdgeInferError as error:
            failure = from_error(error).message
        except Exception as error:  # noqa: BLE001  the page shows that the pull failed, the log has the cause
            self._endpoint.log.error("internal", error)
            failure = "An internal error; the endpoint's log describes it."
        finally:
            stopped = stop.is_set()
            stop.set()  # if this task was cancelled, the thread must stop too
            del self._stops[name], self.now[name]
            self._endpoint.release_request(key)
        if failure and not stopped:
            self.now[name] = wire.Pull(name=name, text=failure, failed=True)


def list_offers() -> list[wire.Offer]:
    """List the catalogue's chat and base models that are not pulled, with their estimated speed."""
    pulled_names = {model.name for model in list_pulled()}
    estimator = Estimator()
    return [
        wire.Offer(name=model.name, title=model.title, about=_describe(model, estimator.fit_of(model)))
        for model in estimator.catalog.values()
        if model.name not in pulled_names and model.purpose not in ("embedding", "reranker")
    ]


def _describe(model: Model, fit: Fit | None) -> str:
    is_chat = model.purpose == "chat"
    facts = ["" if is_chat else f"{model.purpose} model", model.parameters, model.licence]
    if fit is not None:
        facts += [
            format_bytes(model.stored_bytes),
            fit.why if fit.group == "too big" else "",
            f"{'slow: ' * (fit.group == 'slow')}about {fit.tokens_per_s:.1f} tokens/s",
            fit.shortage,
        ]
    return " · ".join(filter(None, facts))
