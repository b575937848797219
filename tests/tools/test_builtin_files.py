"""The built-in tools: below the folder alone."""

import pytest

from edgeinfer.tools import builtin_files
from edgeinfer.tools.builtin_files import TOOLS, BuiltinFiles
from edgeinfer.tools.mcp_client import StoppedError
from edgeinfer.tools.uses import Stop


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "a.txt").write_text("one\ntwo\nthree\n")
    (folder / "src" / "b.py").write_text("x = 1  # two\n")
    (folder / "src" / "c.bin").write_bytes(b"two\0")
    (tmp_path / "secret").write_text("two")
    (folder / "out").symlink_to(tmp_path / "secret")
    return BuiltinFiles(folder, tuple(TOOLS))


def call(files, name, **arguments):
    found = files.call(name, arguments)
    return found.text if not found.is_error else f"error: {found.text}"


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
    assert "the pattern is wrong" in call(files, "grep", pattern="(")


def test_hostile_grep_ends_after_its_time(files, tmp_path, monkeypatch):
    monkeypatch.setattr(builtin_files, "_GREP_S", 1)
    (tmp_path / "project" / "long.txt").write_text("a" * 100_003 + "\n")
    assert call(files, "grep", pattern=r"^(aa+)\1+$") == "error: the search took more than 1 s"
    assert call(files, "grep", pattern="-e two") == "nothing found"
    (tmp_path / "project" / "-r:1.txt").write_text("x\n")
    assert call(files, "grep", pattern="^x$") == "-r:1.txt:1: x"


def test_write_and_edit_show_a_diff_first(files, tmp_path):
    arguments = {"path": "a.txt", "old": "two", "new": "2"}
    assert files.preview("edit", arguments).splitlines()[-4:] == [" one", "-two", "+2", " three"]
    assert call(files, "edit", **arguments).startswith("wrote")
    assert (tmp_path / "project" / "a.txt").read_text() == "one\n2\nthree\n"
    assert files.preview("write", {"path": "new/n.txt", "content": "x"}).endswith("+x")
    call(files, "write", path="new/n.txt", content="x")
    assert (tmp_path / "project" / "new" / "n.txt").read_text() == "x"
    assert files.preview("read", {"path": "a.txt"}) == ""


def test_mistakes_are_told_to_the_model(files):
    assert "stands 0 times" in call(files, "edit", path="a.txt", old="zero", new="x")
    assert "is not a file" in call(files, "read", path="src")
    assert "binary" in call(files, "read", path="src/c.bin")
    said = call(files, "read", file="a.txt")
    assert "wrong arguments: path is missing; there is no file" in said
    assert "lines must be of type integer" in call(files, "read", path="a.txt", lines="2")
    assert "is a folder" in call(files, "write", path="src", content="x")


def test_a_defect_of_a_tool_is_no_wrong_argument(files, monkeypatch):
    monkeypatch.setattr(files, "_read", lambda stop, path: len(None))
    with pytest.raises(TypeError):
        call(files, "read", path="a.txt")


def test_search_is_stopped(files):
    stop = Stop()
    stop.set()
    with pytest.raises(StoppedError):
        files.call("grep", {"pattern": "x"}, stop)
