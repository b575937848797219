"""One model of the pool, from when somebody asks for it until it is unloaded."""

from __future__ import annotations

import asyncio
import time

import msgspec

from edgeinfer.server.core.models.values import Loaded, LoadedModel


class Entry:
    """One model that is loading or loaded."""

    def __init__(self, name: str, need_bytes: int) -> None:
        self.name = name
        self.need_bytes = need_bytes
        self.loaded: Loaded | None = None
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.users = 0
        self.last_used = time.monotonic()
        self.keep_alive_s = 0.0
        self.expiry: asyncio.TimerHandle | None = None
        self.stage = "waiting for memory"
        self.fraction: float | None = None

    def report(self, stage: str, fraction: float | None) -> None:
        """Called from the loading thread; two plain assignments need no lock."""
        self.stage, self.fraction = stage, fraction

    def describe(self, now: float) -> LoadedModel:
        """Say what an operator sees of it but its replicas; `now` is the event loop's time."""
        if self.loaded is None:
            return LoadedModel(
                id=self.name,
                state="loading",
                where="",
                in_use=self.users,
                expires_in_s=None,
                size_bytes=self.need_bytes,
                load_ms=0.0,
            )
        info = self.loaded.engine.info
        described = msgspec.to_builtins(info)
        described["lora"] = [{"name": a.name, "scale": a.scale} for a in info.lora]
        expires = None if self.expiry is None else max(0.0, self.expiry.when() - now)
        return LoadedModel(
            id=self.name,
            state="loaded",
            where=self.loaded.where,
            in_use=self.users,
            expires_in_s=expires,
            size_bytes=self.need_bytes,
            load_ms=info.load_ms,
            info=described,
        )
