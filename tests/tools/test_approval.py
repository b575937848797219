"""Patterns, levels, and what a person types at a card."""

import pytest

from edgeinfer.config.config_file import ToolsConfig, load_config
from edgeinfer.errors import ConfigError
from edgeinfer.tools.approval import Approvals, Decision, parse, parse_decision, pattern_for


@pytest.mark.parametrize(
    ("pattern", "arguments", "matched"),
    [
        ("s.*", {}, True),
        ("s.t", {"x": 1}, True),
        ("s.other", {}, False),
        ("s.t(path=notes/*)", {"path": "notes/a.txt"}, True),
        ("s.t(path=notes/*)", {"path": "notes/../secret"}, False),
        ("s.t(path=notes/*)", {"path": "other/notes/a"}, False),
        ("s.t(path=notes/*)", {}, False),
        ("s.t(n=3, path=a[1])", {"n": 3, "path": "a[1]"}, True),
        ("s.t(n=3, path=a[1])", {"n": 4, "path": "a[1]"}, False),
        (r"s.t(words=a\, b)", {"words": "a, b"}, True),
    ],
)
def test_pattern(pattern, arguments, matched):
    assert parse(pattern).matches("s", "t", arguments) is matched


@pytest.mark.parametrize("text", ["", "s", "s.t(", "s.t()", "s.t(x)", "s t", "s.t(a=1,)b"])
def test_broken_pattern_is_refused(text):
    with pytest.raises(ConfigError, match="no pattern"):
        parse(text)


@pytest.mark.parametrize(
    "arguments",
    [
        {"path": "notes/deep/a.txt"},
        {"url": "https://example.com/a?b=c"},
        {"words": "a, b", "n": 3, "flag": True},
        {"content": "x" * 200, "path": "a.txt"},
        {"glob": "*.py"},
    ],
)
def test_proposed_pattern_matches_its_call(arguments):
    assert parse(pattern_for("s", "t", arguments)).matches("s", "t", arguments)


def test_proposed_pattern_stays_near():
    proposed = parse(pattern_for("s", "t", {"path": "notes/a.txt", "url": "https://example.com/x"}))
    assert not proposed.matches("s", "t", {"path": "other/a.txt", "url": "https://example.com/x"})
    assert not proposed.matches("s", "t", {"path": "notes/b.txt", "url": "https://elsewhere.org/x"})


def test_deny_goes_before_allow_and_ask_is_the_rule():
    approvals = Approvals(ToolsConfig(allow=("s.*",), deny=("s.rm",)))
    assert approvals.level("s", "ls", {}) == "allow"
    assert approvals.level("s", "rm", {}) == "deny"
    assert approvals.level("other", "ls", {}) == "ask"
    assert approvals.level("files", "read", {}, harmless=True) == "allow"


def test_a_destructive_claim_raises_the_level_of_a_wildcard():
    approvals = Approvals(ToolsConfig(allow=("s.*", "s.exact")))
    assert approvals.level("s", "t", {}, destructive=True) == "ask"
    assert approvals.level("s", "exact", {}, destructive=True) == "allow"


def test_allowed_pattern_is_kept_in_the_configuration():
    approvals = Approvals(ToolsConfig(allow=("a.b",)))
    approvals.allow_always("s.t(path=notes/*)")
    assert load_config().tools.allow == ("a.b", "s.t(path=notes/*)")
    assert approvals.level("s", "t", {"path": "notes/x"}) == "allow"


@pytest.mark.parametrize(
    ("typed", "decision"),
    [
        ("y", Decision("once")),
        ("A", Decision("conversation")),
        ("p", Decision("pattern")),
        ("n", Decision("no")),
        ("n use another file", Decision("no", "use another file")),
        ("yesterday", Decision("no", "yesterday")),
        ("", Decision("no")),
    ],
)
def test_decision(typed, decision):
    assert parse_decision(typed) == decision
