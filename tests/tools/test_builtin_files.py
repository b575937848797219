"""The built-in file tools, which use only files below their folder."""

import collections
import os
import subprocess
import sys
import threading
import time

import pytest

from edgeinfer.config.config_file import config_path
from edgeinfer.platform import paths
from edgeinfer.tools import builtin_files
from edgeinfer.tools.builtin_files import TOOLS, BuiltinFiles
from edgeinfer.tools.tool_use import Stop, StoppedError


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "a.txt").write_text("one\ntwo\nthree\n")
    (folder / "src" / "b.py").write_text("x = 1  # two\n")
    (folder / "src" / "c.bin").write_bytes(b"two\0")
    (tmp_path / "secret").write_text("two")
    (folder / "out").symlink_to(tmp_path / "secret")
    return BuiltinFiles(folder, [tool.name for tool in TOOLS])


def call(files, name, **arguments):
    result = files.call(name, files.canonical(name, arguments))
    return result.text if not result.is_error else f"error: {result.text}"


def test_read_numbers_lines(files):
    assert call(files, "read", path="a.txt") == "1\tone\n2\ttwo\n3\tthree"
    assert call(files, "read", path="a.txt", first_line=2, lines=1) == "2\ttwo\n… 3 lines in all"


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "out", "src/../../secret"])
@pytest.mark.parametrize("name", ["read", "write", "edit"])
def test_nothing_outside_of_the_folder(files, tmp_path, name, path):
    arguments = {"read": {}, "write": {"content": "x"}, "edit": {"old": "two", "new": "x"}}[name]
    assert "outside of the folder" in call(files, name, path=path, **arguments)
    assert (tmp_path / "secret").read_text() == "two"


def test_glob_and_grep(files):
    assert call(files, "glob", pattern="**/*.py") == "src/b.py"
    assert call(files, "glob", pattern="*.txt") == "a.txt"
    assert call(files, "glob", pattern="*.rs") == "no file matches"
    assert call(files, "grep", pattern="tw.") == "a.txt:2: two\nsrc/b.py:1: x = 1  # two"
    assert call(files, "grep", pattern="two", glob="*.py") == "src/b.py:1: x = 1  # two"
    assert "the pattern is invalid" in call(files, "grep", pattern="(")


def test_hostile_grep_ends_after_its_time(files, tmp_path, monkeypatch):
    monkeypatch.setattr(builtin_files, "_GREP_S", 1)
    (tmp_path / "project" / "long.txt").write_text("a" * 100_003 + "\n")
    assert call(files, "grep", pattern=r"^(aa+)\1+$") == "error: the search took more than 1 s"
    monkeypatch.setattr(builtin_files, "_GREP_S", 60)
    assert call(files, "grep", pattern="-e two") == "nothing found"
    (tmp_path / "project" / "-r:1.txt").write_text("x\n")
    assert call(files, "grep", pattern="^x$") == "-r:1.txt:1: x"


def test_write_and_edit_show_a_diff_first(files, tmp_path):
    arguments = {"path": "a.txt", "old": "two", "new": "2"}
    assert files.preview("edit", arguments).splitlines()[-4:] == [" one", "-two", "+2", " three"]
    assert call(files, "edit", **arguments).startswith("wrote")
    assert (tmp_path / "project" / "a.txt").read_text() == "one\n2\nthree\n"
    assert files.preview("write", {"path": "new/n.txt", "content": "x"}).endswith("+x\n\\ no newline")
    call(files, "write", path="new/n.txt", content="x")
    assert (tmp_path / "project" / "new" / "n.txt").read_text() == "x"
    assert files.preview("read", {"path": "a.txt"}) == ""


def test_mistakes_are_told_to_the_model(files):
    assert "occurs 0 times" in call(files, "edit", path="a.txt", old="zero", new="x")
    assert "is not a file" in call(files, "read", path="src")
    assert "binary" in call(files, "read", path="src/c.bin")
    said = call(files, "read", file="a.txt")
    assert "wrong arguments: missing argument: path; unknown argument: file" in said
    assert "lines must be of type integer" in call(files, "read", path="a.txt", lines="2")
    assert "is a folder" in call(files, "write", path="src", content="x")


def test_a_defect_of_a_tool_is_no_wrong_argument(files, monkeypatch):
    monkeypatch.setattr(files, "_read", lambda stop, path: len(None))
    with pytest.raises(TypeError):
        call(files, "read", path="a.txt")


def test_a_stop_ends_grep_and_a_walk_over_empty_folders(files, tmp_path, monkeypatch):
    monkeypatch.setattr(builtin_files, "_GREP_S", 600)
    (tmp_path / "project" / "long.txt").write_text("a" * 100_003 + "\n")
    stop = Stop()
    threading.Timer(1.0, stop.set).start()
    with pytest.raises(StoppedError):
        files.call("grep", {"pattern": r"^(aa+)\1+$"}, stop)
    for file in (tmp_path / "project").rglob("*.*"):
        file.unlink()
    with pytest.raises(StoppedError):
        files.call("glob", {"pattern": "*"}, stop)


def test_a_change_without_a_diff_is_shown_by_its_arguments(files, tmp_path):
    rows = "".join(f"{i * 7 % 101}\n" for i in range(50_000))
    (tmp_path / "project" / "rows.txt").write_text(f"{rows}end\n")
    assert files.preview("edit", {"path": "rows.txt", "old": "end", "new": "END"}) == ""
    assert files.preview("write", {"path": "src/c.bin", "content": "x"}) == "", "it is not text"


@pytest.mark.parametrize("ending", ["\r", "\x0b", "\x85", "\u2028", " ", ""])
def test_a_diff_shows_every_change(files, ending):
    """Split at other line separators, the diff would be empty, or hide where a line ends."""
    diff = files.preview("write", {"path": "a.txt", "content": f"one{ending}\ntwo\nthree\n"})
    assert (f"+one{ending}\n" in diff) is bool(ending)
    assert files.preview("write", {"path": "a.txt", "content": "one\ntwo\nthree"}).endswith(
        "-three\n+three\n\\ no newline"
    )


def test_a_call_follows_no_link(files, tmp_path):
    """Links are resolved before a call is judged; a call that then meets one is refused."""
    (tmp_path / "project" / "inner").symlink_to("src")
    assert files.canonical("read", {"path": "./inner/../a.txt"}) == {"path": "a.txt"}
    assert files.canonical("read", {"path": "inner/b.py"}) == {"path": "src/b.py"}
    for path in ("inner/b.py", "out"):
        assert files.call("read", {"path": path}).is_error
        assert files.call("write", {"path": path, "content": "x"}).is_error
    assert (tmp_path / "secret").read_text() == "two"


@pytest.mark.slow  # it starts grep
def test_nothing_escapes_by_a_race(files, tmp_path):
    """A folder is exchanged with a link to outside, again and again, until both have been met."""
    project, outside = tmp_path / "project", tmp_path / "outside"
    for folder in (project / "a", outside):
        folder.mkdir()
        (folder / "key").write_text(folder.name)
    (project / "b").symlink_to(outside)
    swap = (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
        "while True: libc.renameat2(-100, b'a', -100, b'b', 2)"  # RENAME_EXCHANGE
    )
    key = {"path": "a/key"}
    calls = [("read", key), ("write", key | {"content": "a"}), ("edit", key | {"old": "a", "new": "a"})]
    calls = [*calls, ("write", {"path": "a/planted", "content": "x"})] * 50
    calls.append(("grep", {"pattern": "outside|^a$"}))
    texts = []
    both = {"read", "write", "edit", "Not a directory"}
    end_s = time.monotonic() + 60
    with subprocess.Popen([sys.executable, "-c", swap], cwd=project) as swapping:
        while len(texts) < 4000 or (not both <= set(texts) and time.monotonic() < end_s):
            for name, arguments in calls:
                for judged in (files.canonical(name, arguments), arguments):
                    answer = files.call(name, judged)
                    texts.append(answer.text if answer.is_error else name)
                    assert answer.is_error or "outside" not in answer.text
        swapping.kill()
    print(collections.Counter(texts))
    assert {path.name for path in outside.iterdir()} == {"key"}
    assert (outside / "key").read_text() == "outside"
    assert both <= set(texts), "the folder and the link were not both met"


def test_grep_is_not_taken_from_the_path(files, tmp_path, monkeypatch):
    planted = tmp_path / "project" / "bin" / "grep"
    planted.parent.mkdir()
    planted.write_text(f"#!/bin/sh\necho x > {tmp_path}/owned\n")
    planted.chmod(0o755)
    monkeypatch.setenv("PATH", f"{planted.parent}:{os.environ['PATH']}")
    assert "a.txt:2: two" in call(files, "grep", pattern="two")
    assert not (tmp_path / "owned").exists()


def test_files_below_the_home_folder_are_not_offered(files, tmp_path, monkeypatch):
    assert files.unavailable() == ""
    monkeypatch.setenv("HOME", str(tmp_path / "project" / "home"))
    assert "contains your home folder" in BuiltinFiles(tmp_path / "project", ("read",)).unavailable()


def test_edgeinfers_own_folders_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path / "own"))
    config_path().parent.mkdir(parents=True)
    (config_path().parent / "keys").write_text("secret")
    files = BuiltinFiles(tmp_path, [tool.name for tool in TOOLS])
    path = str((config_path().parent / "keys").relative_to(tmp_path))
    assert "edgeinfer's data folders" in call(files, "read", path=path)
    assert call(files, "grep", pattern="secret") == "nothing found"
    (tmp_path / "other").mkdir()
    for folder in paths.data_dir(), tmp_path / "other":
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "x.txt").write_text("x")
    assert call(files, "glob", pattern="**/*.txt") == "other/x.txt"


def test_special_files_are_refused_at_once(files, tmp_path):
    os.mkfifo(tmp_path / "project" / "pipe")
    assert "not a file" in call(files, "read", path="pipe")
    assert "not a file" in call(files, "write", path="pipe", content="x")
