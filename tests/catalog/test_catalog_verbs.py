"""The verbs on the command line: words for a person, JSON for a script, exit codes, progress."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from edgeinfer.blocks.store import BlockStore
from edgeinfer.catalog.progress.bar import progress_on
from edgeinfer.catalog.progress.job import Job, PullProgress
from edgeinfer.catalog.progress.text import PlainLines, progress_text
from edgeinfer.catalog.store import list_pulled
from edgeinfer.cli import main
from edgeinfer.snapshots.shelf.format import MANIFEST
from edgeinfer.system import paths


@pytest.fixture
def local(tmp_path: Path, make_gguf) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(make_gguf())
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def result(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    code, out, _ = run(capsys, *argv, "--json")
    assert code == 0, out
    body = json.loads(out)
    assert body["schema"] == "edgeinfer/1"
    assert body["kind"] == argv[0]
    assert body["ok"] is True
    return body["result"]


def test_pull_list_show_rm(local: Path, capsys) -> None:
    pulled = result(capsys, "pull", str(local), "--name", "mine")
    assert (pulled["name"], pulled["was_here"], pulled["quantization"]) == ("mine", False, "F32")
    assert result(capsys, "pull", str(local), "--name", "mine")["was_here"] is True
    listed = {model["name"]: model for model in result(capsys, "list")["models"]}
    assert listed["mine"]["pulled"] is True
    assert listed["qwen3-8b"]["pulled"] is False
    assert [m["name"] for m in result(capsys, "list", "--pulled")["models"]] == ["mine"]
    assert {m["purpose"] for m in result(capsys, "list", "embedding")["models"]} == {"embedding"}
    shown = result(capsys, "show", "mine")
    assert shown["header"]["architecture"] == "llama"
    assert shown["files"][0]["sha256"] == pulled["sha256"]
    assert shown["memory"]["fits"] is True
    removed = result(capsys, "rm", "mine")["removed"]
    assert removed[0]["name"] == "mine"
    assert result(capsys, "list", "--pulled")["models"] == []


def test_snapshots_are_counted_and_go_with_their_model(local: Path, capsys) -> None:
    root = paths.private_dir(paths.snapshots_dir())
    for name in ("mine@01", "mine,ctx512@02", "mine+Q8_0@03", "minest@04"):
        (root / name).mkdir(mode=0o700)
        (root / name / MANIFEST).touch(mode=0o600)
    main(["pull", str(local), "--name", "mine", "--quiet"])
    capsys.readouterr()
    assert result(capsys, "list", "--pulled")["models"][0]["snapshots"] == 2
    assert sorted(result(capsys, "rm", "mine")["snapshots"]) == ["mine", "mine,ctx512"]
    assert sorted(path.name for path in root.iterdir()) == ["mine+Q8_0@03", "minest@04"]


def test_what_a_model_has_read_goes_with_it(local: Path, capsys) -> None:
    pulled = result(capsys, "pull", str(local), "--name", "mine")
    blocks = BlockStore(paths.blocks_dir()).model(pulled["sha256"], {})
    kept = BlockStore(paths.blocks_dir()).model("another", {})
    folders = [one.path(b"x").parent for one in (blocks, kept)]
    result(capsys, "rm", "mine")
    assert [folder.exists() for folder in folders] == [False, True]


def test_words(local: Path, capsys) -> None:
    code, out, err = run(capsys, "pull", str(local), "--name", "mine")
    assert code == 0
    assert out.startswith("mine is here:")
    assert "edgeinfer run mine" in out
    assert "copying tiny.gguf" in err
    _, out, _ = run(capsys, "list")
    assert out.splitlines()[0].split() == [
        "NAME",
        "HERE",
        "SIZE",
        "PARAMETERS",
        "QUANT",
        "CONTEXT",
        "SNAPSHOTS",
        "LICENCE",
        "FOR",
    ]
    _, out, _ = run(capsys, "show", "mine")
    for word in (
        "architecture",
        "sha256",
        "KV cache",
        "for 1,000 tokens",
        "compute",
        "available",
        "trained context",
    ):
        assert word in out
    _, out, _ = run(capsys, "show", "qwen3-8b")
    assert "not here yet: edgeinfer pull qwen3-8b" in out
    _, out, _ = run(capsys, "rm", "mine")
    assert out.startswith("mine is removed:")
    _, out, _ = run(capsys, "list", "no-such-thing")
    assert out == "no model matches\n"


def test_quiet_is_quiet(local: Path, capsys) -> None:
    _, _, err = run(capsys, "pull", str(local), "--name", "mine", "--quiet")
    assert err == ""


def test_show_says_what_is_wrong(local: Path, capsys) -> None:
    main(["pull", str(local), "--name", "mine", "--quiet"])
    list_pulled()[0].paths[0].touch()
    capsys.readouterr()
    shown = result(capsys, "show", "mine")
    assert "was changed after mine was pulled" in shown["notes"][0]


@pytest.mark.parametrize(
    ("argv", "code", "kind"),
    [
        (("pull", "nope"), 3, "unknown-model"),
        (("pull", "a/b:Q9"), 2, "usage"),
        (("pull", "/no/such.gguf"), 4, "source-not-found"),
        (("show", "nope"), 3, "unknown-model"),
        (("show", "/no/such.gguf"), 5, "invalid-gguf"),
        (("rm", "qwen3-4b"), 3, "model-not-pulled"),
        (("quantize", "qwen3-4b", "Q8_0"), 3, "model-not-pulled"),
        (("quantize", "qwen3-4b", "Q99"), 2, "usage"),
    ],
)
def test_errors_have_codes_and_no_traceback(argv, code, kind, capsys) -> None:
    got, out, err = run(capsys, *argv, "--json")
    body = json.loads(out)
    assert (got, body["error"]["code"], body["ok"]) == (code, kind, False)
    assert "Traceback" not in err
    got, out, err = run(capsys, *argv)
    assert got == code
    assert out == ""
    assert "error: " in err
    assert "\nhint: " in err


def test_offline_is_an_error_with_a_way_out(monkeypatch, capsys) -> None:
    monkeypatch.setenv("EDGEINFER_OFFLINE", "1")
    code, out, _ = run(capsys, "pull", "qwen3-4b", "--json")
    assert code == 4
    assert json.loads(out)["error"]["code"] == "offline"


def test_progress_is_one_line_with_what_is_known() -> None:
    now = PullProgress(
        stage="downloading",
        file="x.gguf",
        index=1,
        n_files=3,
        done_bytes=12_000_000,
        total_bytes=98_400_000,
    )
    assert progress_text(now) == "downloading x.gguf (2 of 3): 12.0 MB of 98.4 MB"
    fast = PullProgress(
        stage="downloading", file="x", done_bytes=5_000, rate_bytes_per_s=3.1e6, left_s=200, note="why"
    )
    assert progress_text(fast) == "downloading x: 5.0 kB, 3.1 MB/s, 3 min 20 s left: why"
    assert (
        progress_text(PullProgress(stage="quantizing", file="x", done_bytes=3, total_bytes=9))
        == "quantizing x: 3 of 9 tensors"
    )


def test_plain_lines_are_few() -> None:
    out = io.StringIO()
    lines = PlainLines(out, interval_s=3600)
    for done in range(100):
        lines.report(PullProgress(stage="downloading", file="x", done_bytes=done, total_bytes=100))
    lines.report(
        PullProgress(stage="downloading", file="x", done_bytes=99, total_bytes=100, note="dropped")
    )
    lines.report(PullProgress(stage="verifying", file="x"))
    assert len(out.getvalue().splitlines()) == 3


def test_the_bar_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    with progress_on(out) as report:
        job = Job(report)
        job.begin("downloading", "x.gguf", total=100)
        job.at(50)
        job.note("the connection was dropped; trying again")
        job.at(100)
        job.begin("verifying", "x.gguf", total=100)
    said = out.getvalue()
    assert "x.gguf" in said
    assert "the connection was dropped" in said
