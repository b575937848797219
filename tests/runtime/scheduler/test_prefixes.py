"""Opening the on-disk prefix cache again after a switch between the CPU and a GPU."""

from typing import Any, cast

import pytest

from edgeinfer.errors import SnapshotUnsafeError
from edgeinfer.runtime.options import Counters
from edgeinfer.runtime.prefix_cache.cache import PrefixCache
from edgeinfer.runtime.scheduler.prefixes import Prefixes


@pytest.mark.parametrize("error", [OSError(28, "No space left"), SnapshotUnsafeError("not private")])
def test_engine_goes_on_without_a_cache_that_cannot_be_opened(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    nothing = cast(Any, None)
    prefixes = Prefixes(nothing, nothing, Counters(), nothing)
    caches = iter([cast(PrefixCache, object())])

    def make_cache(*_: object) -> PrefixCache:
        for cache in caches:
            return cache
        raise error

    prefixes.open_cache(make_cache, nothing, "exact")
    assert prefixes.prefix_cache is not None
    prefixes.prefix_cache = None
    prefixes.attach_cache(nothing)
    assert prefixes.prefix_cache is None
    assert f"the on-disk prefix cache is off: {error}" in caplog.text
