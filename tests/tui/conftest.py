"""Fixtures that drive the app; they wait for conditions, never for a fixed time."""

import contextlib

import pytest
from fixed_chat import Driven, FixedHost, make_app


@pytest.fixture
def drive(tmp_path):
    """`async with drive(engine) as d`: the chat on an 80 by 24 terminal; `ready` loads its model."""

    @contextlib.asynccontextmanager
    async def driving(engine=None, host=None, size=(80, 24), ready=True, **fields):
        app = make_app(tmp_path, host or FixedHost(engine), **fields)
        async with app.run_test(size=size, notifications=True) as pilot:
            driven = Driven(pilot)
            if ready:
                await driven.ready()
            yield driven

    return driving
