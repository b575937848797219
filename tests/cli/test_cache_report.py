"""How much of the latest prompt was cached: its text, and reading it from another process's memory."""

import pytest

from edgeinfer.runtime.events import CacheReport, Divergence, Usage


def last(cause="text", **fields):
    usage = Usage(prompt_tokens=1204, cached_tokens=1100, cached_disk_tokens=fields.pop("disk", 0))
    return CacheReport(model="m", usage=usage, divergence=Divergence(cause=cause, **fields))


@pytest.mark.parametrize(
    ("report", "summary"),
    [
        (last("none"), "prompt cache: 1,100 of 1,204 tokens"),
        (last("none", disk=900), "1,100 of 1,204 tokens, 900 from disk"),
        (last("end", n_tokens=1100), "tokens; new from token 1,101 on"),
        (last("nothing"), "tokens; no cached prefix"),
        (
            last("text", n_tokens=3, before="a\nb ", here="\x1b[2Jred", there="blue"),
            "matches the cache for 3 tokens, then differs: after “a b” “[2Jred” instead of “blue”",
        ),
    ],
)
def test_cache_report_names_cached_tokens_and_the_divergence(report, summary):
    assert report.summary.endswith(summary)
