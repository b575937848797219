"""The watchdog of tests, which reports work that blocks the event loop too long."""

import asyncio
import time

import pytest
from loop_watchdog import MOST_S, watch_loop


def _work(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def test_callback_that_holds_the_loop_is_named():
    async def busy(seconds: float) -> None:
        await asyncio.sleep(0)
        _work(seconds)

    async def main() -> None:
        with watch_loop(asyncio.get_running_loop()):
            await asyncio.create_task(busy(2 * MOST_S))

    with pytest.raises(AssertionError, match=r"busy held the event loop for 0\.[4-9]"):
        asyncio.run(main())
