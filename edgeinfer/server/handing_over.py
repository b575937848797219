"""Leaving the endpoint to a resumed process: the sockets stay, and no client is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from edgeinfer.host import HandOver
from edgeinfer.server.core.exchange import Endpoint

_LOOK_S = 0.05
#: How often, in seconds, it is looked whether other models have their snapshots by now, and whether
#: answers are kept that somebody may come back for.
_LOOK_AT_OTHERS_S = 5.0


class HandingOver:
    """Waits for the launcher's words, on the event loop; `leave` ends this process gently."""

    def __init__(
        self, endpoint: Endpoint, hand_over: HandOver, leave: Callable[[], Coroutine[None, None, None]]
    ) -> None:
        self._endpoint = endpoint
        self._hand_over = hand_over
        self._leave = leave
        self._task: asyncio.Task[None] | None = None
        self._fd = hand_over.listen()
        asyncio.get_running_loop().add_reader(self._fd, self._receive)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        if self._task is not None:
            self._task.cancel()

    def _receive(self) -> None:
        word = self._hand_over.receive()
        if word == "end":
            self.close()
            return
        work = self._say_when_idle() if word == "offer" else self._leave()
        self._task = asyncio.get_running_loop().create_task(work)

    async def _say_when_idle(self) -> None:
        while self._has_what_would_go() or not await self._others_return_at_once():
            await asyncio.sleep(_LOOK_AT_OTHERS_S)
        while self._is_busy():
            await asyncio.sleep(_LOOK_S)
        if self._has_what_would_go():  # by a request that came meanwhile
            await self._say_when_idle()
        else:
            self._hand_over.idle()

    def _has_what_would_go(self) -> bool:
        """Whether answers end with this process, or adapters that were loaded while a model ran."""
        return self._endpoint.keeps_answers or self._endpoint.models.has_changed_adapters

    def _is_busy(self) -> bool:
        return bool(self._endpoint.in_flight or self._endpoint.models.loading())

    async def _others_return_at_once(self) -> bool:
        models = self._endpoint.models
        others = {name for name, _ in models.engines()} - {models.default}
        return not others or others <= await self._endpoint.in_thread(self._endpoint.warm_models)
