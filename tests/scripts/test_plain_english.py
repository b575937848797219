"""scripts/plain_english.py finds names that say nothing, and its limits only fall."""

from collections import Counter

import plain_english
import pytest


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("found = 1", "empty"),
        ("for one in x: pass", "empty"),
        ("def f(given): pass", "empty"),
        ("self._kept = 1", "empty"),
        ("[place for place in x]", "empty"),
        ("def listed(): pass", "participle"),
        ("async def _chosen(): pass", "participle"),
    ],
)
def test_names_that_say_nothing_are_found(source, kind):
    assert [finding for _, finding, _ in plain_english.names(source)] == [kind]


@pytest.mark.parametrize(
    "source", ["use(found)", "path = x.found", "def feed(): pass", "def is_listed(): pass"]
)
def test_uses_and_verbs_are_accepted(source):
    assert not list(plain_english.names(source))


def test_limits_fall_to_the_counts_and_never_rise():
    table = "edgeinfer = { empty = 5, participle = 2 }\ntests = { empty = 9, participle = 9 }\n"
    counts = {"edgeinfer": Counter(empty=3, participle=4), "tests": Counter(empty=9)}
    lowered = "edgeinfer = { empty = 3, participle = 2 }\ntests = { empty = 9, participle = 0 }\n"
    assert plain_english.lower_limits(table, counts) == lowered
