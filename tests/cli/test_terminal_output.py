"""Output on a terminal: no escapes from files or names, and questions before a deletion."""

import contextlib
import io
import os
from pathlib import Path

import pytest
from made_gguf import gguf_bytes

from edgeinfer.cli.main import main
from edgeinfer.cli.terminal import StageProgress
from edgeinfer.models.pull import pull

ESCAPES = "\x1b]0;owned\x07\x1b[31m\x9b2J"


def shown_by(*typed: str) -> tuple[int, str]:
    """Run a command line with stdout and stderr on a terminal; return its exit code and the screen."""
    master, terminal = os.openpty()
    with (
        open(terminal, "w", encoding="utf-8") as screen,
        contextlib.redirect_stdout(screen),
        contextlib.redirect_stderr(screen),
    ):
        code = main(typed)
        screen.flush()
        shown = os.read(master, 1 << 16).decode()
    os.close(master)
    return code, shown


@pytest.mark.parametrize(
    ("typed", "status"), [(["show", "{}"], 0), (["batch", f"/nosuch{ESCAPES}", "out.jsonl"], 2)]
)
def test_escapes_of_a_file_or_an_error_are_not_shown(tmp_path: Path, typed, status):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(gguf_bytes({"general.license": f"a{ESCAPES}b"}))
    code, shown = shown_by(*(word.format(path) for word in typed))
    assert code == status
    assert "owned" in shown
    assert not {"\x1b", "\x07", "\x9b"} & set(shown)


@pytest.fixture
def pulled_model(tmp_path: Path):
    """Store the model `m`."""
    (tmp_path / "m.gguf").write_bytes(gguf_bytes())
    pull(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("typed", "question"),
    [
        ("forget all", "Delete the cached prefixes of every model? [y/N]"),
        ("forget m", "Delete the cached prefixes of m? [y/N]"),
        ("rm m", "Remove m and its snapshots? [y/N]"),
    ],
)
def test_verb_that_deletes_asks_on_a_terminal(pulled_model, answer_no, capsys, typed, question):
    assert main(typed.split()) == 130
    assert question in capsys.readouterr().err


@pytest.mark.parametrize("typed", ["forget all", "rm m"])
@pytest.mark.parametrize("stdin", [io.StringIO("y\n"), None])
def test_verb_that_deletes_refuses_without_a_terminal(pulled_model, monkeypatch, capsys, typed, stdin):
    monkeypatch.setattr("sys.stdin", stdin)
    assert main(typed.split()) == 2
    said = capsys.readouterr().err
    assert "stdin is not a terminal" in said
    assert "--yes" in said


def test_line_breaks_in_a_files_name_add_no_rows(tmp_path, capsys):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(gguf_bytes({"general.name": "a\nlicence  MIT"}))
    assert main(["show", str(path)]) == 0
    assert not any(line.startswith("licence  MIT") for line in capsys.readouterr().out.splitlines())


def test_stages_are_timed_also_where_none_is_shown():
    out = io.StringIO()
    with StageProgress(out, quiet=True) as progress:
        for stage in ("wait", "load", "load"):
            progress.report(stage, None)
    assert out.getvalue() == ""
    assert {"wait", "load"} <= progress.seconds.keys()


def test_stage_shows_its_elapsed_time_and_what_it_waits_for():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    with StageProgress(out, quiet=False, note="idle cores only") as progress:
        progress.report("load", None)
    shown = out.getvalue()
    assert "load … 0 s (idle cores only)" in shown
    assert shown.endswith("load 0.0 s\n")
