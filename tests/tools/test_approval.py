"""Patterns, levels, and the answers that a user types to a card."""

import json
import os
import random
import string
from pathlib import Path

import pytest

from edgeinfer.config.config_file import ToolsConfig, config_path, load_config
from edgeinfer.errors import ConfigError
from edgeinfer.tools.approval import Approvals, Decision, parse, parse_decision, pattern_for

HIDDEN = [
    *map(chr, (*range(0x20), *range(0x7F, 0xA0), 0x200B, 0x200E, 0x202E, 0x2066, 0xFEFF, 0xE0041))
]


@pytest.mark.parametrize(
    ("pattern", "arguments", "matched"),
    [
        ("s.*", {}, True),
        ("s.t", {"x": 1}, True),
        ("s.t()", {"x": 1}, False),
        ("s.t()", {}, True),
        ("s.other", {}, False),
        ("s.t(path=notes/*)", {"path": "notes/a.txt"}, True),
        ("s.t(path=./notes/*)", {"path": "notes/a.txt"}, True),
        ("s.t(path=notes/*)", {"path": "notes/../secret"}, False),
        ("s.t(path=notes/*)", {"path": "other/notes/a"}, False),
        ("s.t(path=notes/*)", {}, False),
        ("s.t(path=../a)", {"path": "../a"}, True),  # the same spelling
        ("s.t(path=/home/u/*)", {"path": "/home/u/a/b"}, True),
        ("s.t(path=/home/u/*)", {"path": "/home/u/.ssh/id"}, False),
        ("s.t(path=/home/u/.ssh/*)", {"path": "/home/u/.ssh/id"}, True),
        ("s.t(path=*)", {"path": ".env"}, False),
        ("s.t(path=.*)", {"path": ".env"}, False),
        ("s.t(n=3, path=a[1])", {"n": 3, "path": "a[1]"}, True),
        ("s.t(n=3, path=a[1])", {"n": 4, "path": "a[1]"}, False),
        (r"s.t(words=a\, b)", {"words": "a, b"}, True),
        (r"s.t(words=a\*b\n)", {"words": "a*b\n"}, True),
        (r"s.t(words=a\*b)", {"words": "a b"}, False),
        ("s.t(url=https://*.python.org/*)", {"url": "https://docs.python.org/x"}, True),
        ("s.t(url=https://*.python.org/*)", {"url": "https://docs.python.org"}, True),
        ("s.t(url=https://*.python.org/*)", {"url": "https://evil.example/.python.org/"}, False),
        ("s.t(url=https://*.python.org/*)", {"url": "https://evil.example#.python.org/"}, False),
        ("s.t(url=https://python.org/*)", {"url": "https://python.org@evil.example/"}, False),
        ("s.t(url=https://*.python.org/*)", {"url": "https://evil.example%2f.python.org/"}, False),
        ("s.t(url=https://*.python.org/*)", {"url": "https://evil.example／.python.org/"}, False),
        ("s.t(url=https://*.python.org/*)", {"url": "https://evil.example\\\\.python.org/"}, False),
        ("s.t(url=https://python.org/*)", {"url": "http://python.org/"}, False),
        ("s.t(url=http*://a.org/*)", {"url": "https://a.org/x"}, True),
        ("s.t(url=http*://a.org/*)", {"url": "https://evil.example/?q=://a.org/x"}, False),
        ("s.t(url=*://a.org/*)", {"url": "https://evil.example/?q=://a.org/x"}, False),
        ("s.t(url=*a.org/*)", {"url": "https://evil.example/?q=a.org/x"}, False),
        ("s.t(url=https://a.org*)", {"url": "https://a.org/x"}, True),
        ("s.t(url=https://a.org*)", {"url": "https://a.org.evil.example/"}, False),
        ("s.t(url=https://a.org*)", {"url": "https://a.org:80@evil.example/"}, False),
        ("s.t(url=http://a.org:*/x)", {"url": "http://a.org:80/x"}, True),
        ("s.t(url=http://a*org/x)", {"url": "http://a.evil:80/org/x"}, False),
        ("s.t(commands=git *)", {"commands": "git log; rm x"}, False),
        ("s.t(shell_command=git *)", {"shell_command": "git log\nrm x"}, False),
        ("s.t(args=git *)", {"args": ["git log", "$(rm x)"]}, False),
        ("s.t(input=git *)", {"input": "git log --oneline"}, True),
        ("s.t(url=https://python.org/a/*)", {"url": "https://python.org/a/%2e%2e/b"}, False),
        ("s.t(command=git status*)", {"command": "git status --short"}, True),
    ],
)
def test_pattern(pattern, arguments, matched):
    assert parse(pattern).allows("s", "t", arguments) is matched


@pytest.mark.parametrize(
    "more",
    ["; rm -rf .", "&& x", "|x", "& x", "\nx", " $(x)", " `x`", " >x", " <x", " ${x}", " <(x)", "\r x"],
)
def test_a_wildcard_of_a_command_stands_for_no_operator(more):
    pattern = parse("sandbox.shell(command=git status*)")
    assert not pattern.allows("sandbox", "shell", {"command": f"git status{more}"})
    assert parse("sandbox.shell").allows("sandbox", "shell", {"command": f"git status{more}"})


@pytest.mark.parametrize("text", ["", "s", "s.t(", "s.t(x)", "s t", "s.t(a=1,)b", "s.t(a=1", "s.t\\"])
def test_broken_pattern_is_refused(text):
    with pytest.raises(ConfigError, match="is not a pattern `SERVER"):
        parse(text)


def text_of(choose):
    letters = [*string.printable, *HIDDEN, "é", "漢", *"*\\,()=.[]?;|&", "..", "//", "./"]
    return "".join(choose.choices(letters, k=choose.randrange(1, 30)))


def test_proposed_patterns_match_their_call_and_no_other():
    """10,000 generated calls, each also with another host, folder or command, or with a separator."""
    choose = random.Random(7)
    schemes, ends = ["http://", "https://"], ["", "/", "/a?b=c#d", "/x/y"]
    hosts = ["docs.python.org", "a.b:8080", "127.0.0.1", "[::1]", "münchen.example"]
    n_proposed = 0
    for _ in range(10_000):
        kind = choose.choice(["url", "path", "command", "text"])
        value = {
            "url": lambda: choose.choice(schemes) + choose.choice(hosts) + choose.choice(ends),
            "path": lambda: "/".join(
                text_of(choose).replace("/", "") for _ in range(choose.randrange(1, 4))
            ),
            "command": lambda: choose.choice(
                ["git status", "./build.sh a", "/usr/bin/env", "ls *.py", text_of(choose)]
            ),
            "text": lambda: text_of(choose),
        }[kind]()
        server, tool = choose.choice([("s", "t"), ("s", "a.b"), ("s", "*"), ("x.y", text_of(choose))])
        text = pattern_for(server, tool, {kind: value})
        if not text:
            continue
        n_proposed += 1
        pattern = parse(text)
        assert pattern.allows(server, tool, {kind: value}), (text, value)
        evil = [value.replace("://", f"://{host}") for host in ("evil.", "evil.example/?", "a:b@")]
        moved = [f"{start}{value}" for start in ("x", "../", "x/", "/")]
        other_values = {
            "url": [*evil, f"ftp{value}", "https://evil.example/"],
            "path": [*moved, f"{os.path.dirname(value)}/.ssh/id", f"{value}/../../y"],
            "command": [f"{value}{suffix}" for suffix in ("; x", "\nx", "&&x", "|x", " $(x)", " x")],
            "text": [f"{value}x", f"x{value}", value.swapcase() + "z"],
        }[kind]
        for other in other_values:
            assert not pattern.allows(server, tool, {kind: other}), (text, other)
        assert not pattern.allows(server, f"{tool}x", {kind: value})
        assert not pattern.allows(f"x{server}", tool, {kind: value})
        assert not pattern.allows(server, tool, {})
    assert n_proposed > 5_000


@pytest.mark.parametrize(
    "arguments", [{"code": "x\n" * 100}, {"command": "x" * 300}, {"a": "b\ud800" * 99}]
)
def test_no_pattern_is_proposed_for_a_long_call(arguments):
    assert pattern_for("sandbox", "shell", arguments) == ""


def test_a_pattern_for_a_file_tool_ignores_the_content():
    call = {"path": "notes/a.txt", "content": "x\n" * 1000}
    assert pattern_for("files", "write", call) == "files.write(path=notes/*)"


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    (folder / ".git").mkdir(parents=True)
    (folder / "sub").mkdir()
    (folder / "inner").symlink_to(".git")
    (folder / "private.txt").write_text("x")
    (folder / "same.txt").symlink_to("private.txt")
    return folder


#: Spellings of paths that the configuration denies; `inner` and `same.txt` are links.
DENIED = """
    .git .git/config ./.git/config sub/../.git/config .git//config .git/./config {folder}/.git/config
    {folder}/sub/../.git/config inner/config sub/../inner/hooks/x .GIT/config nothing/../.git/config
    ../{folder.name}/.git/config private.txt same.txt sub/../same.txt ~/../{relative}/private.txt
""".split()


@pytest.mark.parametrize("path", DENIED)
@pytest.mark.parametrize("inside", ["{}", ["{}"], ["a", "{}"], {"file": "{}"}])
def test_deny_holds_in_every_spelling(project, path, inside, monkeypatch):
    monkeypatch.setenv("HOME", str(project.parent / "home"))
    path = path.format(folder=project, relative=project.name)
    path = json.loads(json.dumps(inside).replace("{}", path))
    deny = ("s.*(path=.git/*)", f"s.*(path={project}/private.txt)")
    approvals = Approvals(ToolsConfig(allow=("s.t",), deny=deny), project)
    assert approvals.level("s", "t", {"path": path}) == "deny"
    assert approvals.level("s", "t", {"path": "sub/git/config"}) == "allow"
    deny = (f"s.*(path={project}/.git/*)", "s.*(path=./private.txt)")
    approvals = Approvals(ToolsConfig(allow=("s.t",), deny=deny), project)
    assert approvals.level("s", "t", {"path": path}) == "deny"


@pytest.mark.parametrize(
    "url",
    [
        "https://evil.example/x",
        "https://EVIL.example/x",
        "HTTPS://evil.example:443/x",
        "https://evil.example./x",
        "https://a:b@evil.example/x",
        "https://evil.example/y/../x",
        "https://evil.example/%78",
        "https:\\\\evil.example\\x",
        " https://evil.example/x\n",
        "https://ev\til.example/x",
        "https://ｅvil。example/x",
    ],
)
def test_deny_of_an_address_holds_in_every_spelling(project, url):
    approvals = Approvals(ToolsConfig(deny=("s.*(url=https://evil.example/*)",)), project)
    assert approvals.level("s", "t", {"url": url}) == "deny"
    assert approvals.level("s", "t", {"url": "https://example.com/evil.example/x"}) == "ask"


def test_deny_of_a_command_holds_behind_an_operator(project):
    approvals = Approvals(ToolsConfig(deny=("sandbox.shell(command=rm *)",)), project)
    for command in ("rm x", "ls; rm x", "ls && rm x", "ls\nrm x", "echo $(rm x)", "a | rm x"):
        assert approvals.level("sandbox", "shell", {"command": command}) == "deny"


def test_deny_goes_before_allow_and_ask_is_the_rule():
    approvals = Approvals(ToolsConfig(allow=("s.*",), deny=("s.rm",)), Path())
    assert approvals.level("s", "ls", {}) == "allow"
    assert approvals.level("s", "rm", {}) == "deny"
    assert approvals.level("other", "ls", {}) == "ask"
    assert approvals.level("files", "read", {}, harmless=True) == "allow"


def test_a_destructive_claim_raises_the_level_of_a_wildcard():
    approvals = Approvals(ToolsConfig(allow=("s.*", "s.exact")), Path())
    assert approvals.level("s", "t", {}, destructive=True) == "ask"
    assert approvals.level("s", "exact", {}, destructive=True) == "allow"


def test_a_pattern_that_was_removed_meanwhile_stays_removed():
    approvals = Approvals(ToolsConfig(allow=("a.b", "c.d")), Path())
    config_path().parent.mkdir(parents=True)
    # the user or another chat has removed `a.b` from the file
    config_path().write_text('[tools]\nallow = [\n  "c.d", # why\n  "e.f",\n]\n')
    approvals.allow_always("s.t")
    assert load_config().tools.allow == ("c.d", "e.f", "s.t")
    assert "# why" in config_path().read_text()


@pytest.mark.parametrize("character", [*HIDDEN, "é", '"', "'", "\\"])
def test_every_pattern_comes_back_from_the_configuration(character):
    approvals = Approvals(ToolsConfig(), Path())
    call = ("s", "t", {"command": f"a{character}b"})
    approvals.allow_always(pattern_for(*call))
    assert Approvals(load_config().tools, Path()).level(*call) == "allow"


def test_allow_here_takes_a_star_in_a_name_literally():
    approvals = Approvals(ToolsConfig(), Path())
    approvals.allow_here(1, "s", "*")
    assert approvals.level("s", "*", {}, conversation=1) == "allow"
    assert approvals.level("s", "rm", {}, conversation=1) == "ask"
    assert approvals.level("s", "*", {}, conversation=2) == "ask"


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
