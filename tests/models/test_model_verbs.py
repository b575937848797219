"""The verbs for models: text, JSON, exit codes and progress."""

import hashlib
import io
import os
from pathlib import Path

import pytest
from made_gguf import Value, gguf_bytes, tokens
from msgspec.structs import replace

from edgeinfer.cli.main import main
from edgeinfer.errors import InvalidGgufError, ModelNotPulledError
from edgeinfer.models.gguf import read_header
from edgeinfer.models.names import parse_reference
from edgeinfer.models.progress import Job, ProgressLines, PullProgress, progress_on, progress_text
from edgeinfer.models.reference import resolve
from edgeinfer.models.store import list_pulled, model_lock
from edgeinfer.platform import paths
from edgeinfer.runtime.prefix_cache.block_folder import BlockStore
from edgeinfer.server.web.models import list_offers
from edgeinfer.snapshot_format.storage import MANIFEST

from .conftest import write_models_toml


@pytest.fixture
def local(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_bytes())
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def test_pull_list_show_rm(local: Path, capsys, as_json) -> None:
    _, out, _ = run(capsys, "list", "--pulled")
    assert out == "no model is pulled yet: `edgeinfer pull smollm2-135m-instruct`\n"
    pulled = as_json("pull", str(local), "--name", "mine")
    assert (pulled["name"], pulled["was_here"], pulled["quantization"]) == ("mine", False, "F32")
    assert as_json("pull", str(local), "--name", "mine")["was_here"] is True
    listed = {model["name"]: model for model in as_json("list")["models"]}
    assert listed["mine"]["pulled"] is True
    assert listed["qwen3-8b"]["pulled"] is False
    assert [m["name"] for m in as_json("list", "--pulled")["models"]] == ["mine"]
    assert {m["purpose"] for m in as_json("list", "embedding")["models"]} == {"embedding"}
    shown = as_json("show", "mine")
    assert shown["header"]["architecture"] == "llama"
    assert shown["files"][0]["sha256"] == pulled["sha256"]
    assert shown["memory"]["fits"] is True
    removed = as_json("rm", "mine", "--yes")["removed"]
    assert removed[0]["name"] == "mine"
    assert as_json("list", "--pulled")["models"] == []


def test_missing_draft_model_is_named_and_one_that_is_here_counted(local: Path, as_json) -> None:
    write_models_toml("mine", "file:/x.gguf", draft="small")
    pulled = as_json("pull", str(local), "--name", "mine")
    missing = "small is not on this machine: `edgeinfer pull small`"
    assert pulled["no_draft"] == missing
    alone, fit = as_json("show", "mine"), as_json("list", "--fits", "--pulled")["models"][0]["fit"]
    assert alone["draft"] == "small"
    assert alone["notes"] == [f"no draft model: {missing}"]
    assert resolve("mine").files(draft="none") == replace(resolve("mine").files(), no_draft="")
    as_json("pull", str(local), "--name", "small")
    both = as_json("show", "mine")
    assert both["notes"] == []
    for key in ("weights_bytes", "kv_per_1000_bytes"):
        assert both["memory"]["estimate"][key] == 2 * alone["memory"]["estimate"][key]
    by_name = {m["name"]: m["fit"] for m in as_json("list", "--fits", "--pulled")["models"]}
    assert by_name["mine"]["needed_bytes"] > fit["needed_bytes"] == by_name["small"]["needed_bytes"]
    files = resolve("mine").files()
    assert (files.draft, files.draft_paths) == ("small", resolve("small").files().paths)
    with pytest.raises(ModelNotPulledError):
        resolve("mine").files(draft="qwen3-0.6b")


@pytest.mark.parametrize("verb", [("serve", "--port=0"), ("run",), ("bench",), ("warm",)])
def test_wrong_draft_model_ends_a_verb_before_it_starts(local: Path, capsys, monkeypatch, verb) -> None:
    monkeypatch.setattr("sys.stdin", None)
    other = local.with_name("other.gguf")
    other.write_bytes(gguf_bytes({"tokenizer.ggml.tokens": tokens(2000)}))
    recurrent = local.with_name("recurrent.gguf")
    recurrent.write_bytes(gguf_bytes({"llama.ssm.state_size": 16}))
    run(capsys, "pull", str(local), "--name", "mine")
    prompt = ["hi"] if verb[0] == "run" else []
    for draft, problem, hint in (
        ("nosuch", "draft model: no model is called 'nosuch'", "or --draft none"),
        ("qwen3-0.6b", "qwen3-0.6b is not on this machine", "edgeinfer pull qwen3-0.6b"),
        (str(other), "the draft model's vocabulary differs (2,000 tokens, not", "--draft none"),
        (
            str(recurrent),
            "the draft model's state cannot be truncated to an earlier token",
            "--draft none",
        ),
    ):
        code, out, err = run(capsys, verb[0], "mine", *prompt, *verb[1:], "--draft", draft)
        assert code
        assert out == ""
        assert problem in err
        assert hint in err
        assert "quotes" not in err


def test_warm_refuses_missing_tools_before_it_builds(local: Path, as_json) -> None:
    as_json("pull", str(local), "--name", "mine")
    assert as_json("warm", "mine", "--tools", code=2)["message"] == "no tools are configured"


def test_snapshots_are_counted_and_go_with_their_model(local: Path, capsys, as_json) -> None:
    root = paths.private_dir(paths.snapshots_dir())
    for name in ("mine@01", "mine,ctx=512@02", "mine+Q8_0@03", "minest@04"):
        (root / name).mkdir(mode=0o700)
        (root / name / MANIFEST).touch(mode=0o600)
    main(["pull", str(local), "--name", "mine", "--quiet"])
    capsys.readouterr()
    assert as_json("list", "--pulled")["models"][0]["snapshots"] == 2
    assert sorted(as_json("rm", "mine", "--yes")["snapshots"]) == ["mine", "mine,ctx=512"]
    assert sorted(path.name for path in root.iterdir()) == ["mine+Q8_0@03", "minest@04"]


def test_nothing_is_removed_if_one_of_several_is_missing(local: Path, as_json) -> None:
    as_json("pull", str(local), "--name", "mine")
    as_json("pull", str(local), "--name", "placed", "--in-place")
    assert as_json("rm", "mine", "nope", "--yes", code=3)["code"] == "unknown-model"
    error = as_json("rm", "mine", str(local), "--yes", code=2)
    assert error["message"] == f"{local} is a file, which edgeinfer never deletes"
    assert error["hint"] in [
        f"to remove the model: `edgeinfer rm {name}`" for name in ("mine", "placed")
    ]
    removed = as_json("rm", "MINE", "mine:F32", "mine", f"file:{local}", "--yes")["removed"]
    assert {row["name"] for row in removed} <= {"mine", "placed"}
    assert len(list_pulled()) == 2 - len(removed)
    assert local.exists()


def test_cached_prefixes_go_with_their_model(local: Path, as_json) -> None:
    pulled = as_json("pull", str(local), "--name", "mine")
    blocks = BlockStore(paths.blocks_dir()).open_folder(pulled["sha256"], {})
    other = BlockStore(paths.blocks_dir()).open_folder("another", {})
    folders = [block_folder.path(b"x").parent for block_folder in (blocks, other)]
    as_json("rm", "mine", "--yes")
    assert [folder.exists() for folder in folders] == [False, True]


def test_changed_draft_model_is_left_out_and_named(local: Path, as_json) -> None:
    write_models_toml("mine", "file:/x.gguf", draft="small")
    for name in ("mine", "small"):
        as_json("pull", str(local), "--name", name)
    (changed,) = resolve("small").parts
    os.utime(changed, ns=(1, 1))
    files = resolve("mine").files()
    assert (files.draft, files.draft_paths) == ("small", ())
    assert files.no_draft == f"{changed} was changed after small was pulled: `edgeinfer pull small`"
    with pytest.raises(InvalidGgufError):
        resolve("mine").files(draft="small")


def test_model_verbs_print_text(local: Path, capsys) -> None:
    code, out, err = run(capsys, "pull", str(local), "--name", "mine")
    assert code == 0
    assert out.startswith("mine is here:")
    assert "edgeinfer run mine" in out
    assert "copying tiny.gguf" in err
    _, out, _ = run(capsys, "list")
    assert out.split()[:9] == "NAME HERE SIZE PARAMETERS QUANT CONTEXT SNAPSHOTS LICENCE FOR".split()
    _, out, _ = run(capsys, "show", "mine")
    labels = ("architecture", "sha256", "KV cache", "for 1,000 tokens", "compute", "trained context")
    assert all(word in out for word in labels)
    _, out, _ = run(capsys, "show", "qwen3-8b")
    assert "not pulled yet: edgeinfer pull qwen3-8b" in out
    assert "needs " in out
    _, out, _ = run(capsys, "rm", "mine", "--yes")
    assert out.startswith("mine is removed:")


def test_words_that_no_model_has_are_an_error_of_list(local: Path, as_json) -> None:
    as_json("pull", str(local), "--name", "mine")
    folder = paths.models_dir() / ".partial/other"
    folder.mkdir(parents=True)
    (folder / "x.part").write_bytes(bytes(9))
    for typed, hint in (
        (("nosuch",), "`edgeinfer list` lists every model"),
        (("gpt-os-20b",), "did you mean gpt-oss-20b? `edgeinfer list` lists every model"),
        (("qwen3", "--pulled"), "`edgeinfer list qwen3` includes models that are not pulled"),
    ):
        assert as_json("list", *typed, code=3)["hint"] == hint
    assert as_json("list", "other")["unfinished"] == {"other": 9}


def test_name_that_hides_a_model_of_the_catalogue_is_warned_of(local: Path, capsys) -> None:
    warning = "warning: qwen3-4b now means this model instead of the catalogue's"
    for name in ("mine", "qwen3-4b"):
        code, _, err = run(capsys, "pull", str(local), "--name", name, "--quiet")
        assert (code, warning in err) == (0, name == "qwen3-4b")


def test_model_pulled_as_an_adapter_is_refused_before_it_is_copied(local: Path, as_json) -> None:
    as_json("pull", str(local), "--name", "mine")
    command = ("pull", str(local), "--base", "mine")
    error = as_json(*command, code=2)
    assert error["message"] == f"{local} is not a PEFT adapter: it has no adapter_config.json"
    assert "leave out --base" in error["hint"]
    assert not list((paths.models_dir() / ".partial").iterdir())
    for flag in ("--in-place", "--quantize"):
        typed = "--quantize=Q8_0" if flag == "--quantize" else flag
        assert f"{flag} is for models" in as_json(*command, typed, code=2)["message"]


def test_pulled_model_is_no_adapter(local: Path, as_json) -> None:
    as_json("pull", str(local), "--name", "mine")
    error = as_json("pull", "mine", "--base", "mine", code=2)
    assert error["message"] == "mine is not a PEFT adapter: it has no adapter_config.json"


def test_adapter_in_gguf_form_is_no_model(tmp_path: Path, as_json) -> None:
    (tmp_path / "red.gguf").write_bytes(gguf_bytes({"general.type": "adapter"}))
    error = as_json("pull", str(tmp_path / "red.gguf"), code=5)
    assert error["message"] == f"{tmp_path}/red.gguf is a LoRA adapter, not a model"
    assert f"--lora {tmp_path}/red.gguf" in error["hint"]


def test_unknown_config_key_is_warned_of_by_list(capsys) -> None:
    paths.config_dir().mkdir(parents=True)
    (paths.config_dir() / "config.toml").write_text('default-modle = "x"\n')
    code, out, err = run(capsys, "list")
    assert (code, out[:4]) == (0, "NAME")
    assert "did you mean `default-model`" in err


def test_model_of_unknown_size_is_shown_and_offered(capsys) -> None:
    write_models_toml("mine", "hf:me/mine-GGUF:Q8_0", licence="MIT")
    code, out, _ = run(capsys, "show", "mine")
    assert (code, "tokens/s" in out) == (0, False)
    assert {offer.name: offer.about for offer in list_offers()}["mine"] == "MIT"


def test_wrong_local_file_is_refused_before_it_is_copied(as_json) -> None:
    error = as_json("pull", "/etc/passwd", code=5)
    assert error["code"] == "invalid-gguf"
    assert "name a GGUF file" in error["hint"]
    assert not list((paths.models_dir() / ".partial").rglob("*passwd*"))


def test_other_type_of_a_model_that_is_here_is_refused(local: Path, as_json) -> None:
    as_json("pull", str(local), "--name", "mine")
    error = as_json("pull", str(local), "--name", "mine", "--quantize", "Q4_0", code=2)
    assert error["code"] == "usage"
    assert "is here already, in F32" in error["message"]
    assert "edgeinfer quantize mine Q4_0" in error["hint"]


def test_digest_that_was_typed_is_compared(server, local: Path, as_json) -> None:
    server.files["/tiny.gguf"] = local.read_bytes()
    command = ("pull", f"{server.url}/tiny.gguf", "--name", "mine", "--quiet")
    digest = hashlib.sha256(local.read_bytes()).hexdigest()
    error = as_json(*command, "--sha256", "0" * 64, code=5)
    assert error["code"] == "checksum"
    assert "as --sha256 says" in error["message"]
    as_json(*command, "--sha256", "12", code=2)
    assert as_json(*command, "--sha256", f"sha256:{digest.upper()}")["sha256"] == digest
    assert as_json(*command, "--sha256", digest)["was_here"]
    as_json(*command, "--sha256", "0" * 64, code=5)  # the stored model does not have this digest
    local.write_bytes(gguf_bytes(seed=3))
    error = as_json("pull", str(local), "--name", "mine", "--sha256", digest, code=2)
    assert "has another file" in error["message"]
    assert list_pulled()[0].sha256 == digest


def test_purpose_follows_from_header(tmp_path: Path, capsys, as_json) -> None:
    keys: dict[str, dict[str, Value]] = {
        'run b "The sea is" --raw': {"general.license": "mit"},
        'run c "What is photosynthesis?"': {"tokenizer.chat_template": "{{ messages }}"},
        "serve e": {"llama.attention.causal": False},
    }
    for command, header_keys in keys.items():
        name = command.split()[1]
        (tmp_path / f"{name}.gguf").write_bytes(gguf_bytes(header_keys))
        _, out, _ = run(capsys, "pull", str(tmp_path / f"{name}.gguf"), "--name", name, "--quiet")
        assert out.splitlines()[-1] == f"try it: edgeinfer {command}"
    listed = as_json("list", "--pulled")["models"]
    assert [row["purpose"] for row in listed] == ["base", "chat", "embedding"]
    assert (listed[0]["parameters"], listed[0]["licence"]) == ("72", "mit")
    assert as_json("pull", str(tmp_path / "b.gguf"))["licence"] == "mit"


def test_texts_of_a_foreign_header_are_short_lines(tmp_path: Path, as_json) -> None:
    text = "a\tb\r\n\x1b[31mc\u2028" + "d" * 500
    path = tmp_path / "b.gguf"
    path.write_bytes(gguf_bytes({"general.license": text, "general.name": text}))
    pulled = as_json("pull", str(path), "--quiet")
    (listed,) = as_json("list", "--pulled")["models"]
    shown = as_json("show", "b")["header"]
    assert {pulled["licence"], listed["licence"], shown["licence"], shown["name"]} == {
        "a b [31mc " + "d" * 49 + "…"
    }
    assert read_header(path).label("general.none") == ""


def test_file_in_place_that_others_may_change_is_warned_of(local: Path, capsys) -> None:
    command = ("pull", str(local), "--in-place", "--quiet", "--name")
    assert "warning" not in run(capsys, *command, "safe")[2]
    local.chmod(0o666)
    assert f"warning: others may change {local}" in run(capsys, *command, "shared")[2]
    local.chmod(0o644)
    local.parent.chmod(0o777)
    assert f"warning: others may change {local}" in run(capsys, *command, "movable")[2]
    local.parent.chmod(0o1777)
    assert "warning" not in run(capsys, *command, "sticky")[2]


def test_unfinished_pull_is_listed_and_removed(capsys) -> None:
    folder = paths.models_dir() / ".partial/mine"
    folder.mkdir(parents=True)
    (folder / "mine.gguf.part").write_bytes(bytes(5000))
    (folder.parent / "empty").mkdir()
    listed = "5.0 kB of an unfinished pull; the same pull continues it, `edgeinfer rm mine` removes it"
    assert listed in run(capsys, "list", "--pulled")[1]
    with model_lock(parse_reference("mine")):
        assert "unfinished" not in run(capsys, "list")[1]
    assert run(capsys, "rm", "mine", "--yes")[0] == 0
    assert "unfinished" not in run(capsys, "list")[1]


def test_show_reports_a_changed_file(local: Path, capsys, as_json) -> None:
    _, _, err = run(capsys, "pull", str(local), "--name", "mine", "--quiet")
    assert err == ""
    list_pulled()[0].paths[0].touch()
    shown = as_json("show", "mine")
    assert "was changed after mine was pulled" in shown["notes"][0]


@pytest.mark.parametrize(
    ("argv", "code", "kind"),
    [
        (("pull", "nope"), 3, "unknown-model"),
        (("pull", "a/b:Q9"), 2, "usage"),
        (("pull", "/no/such.gguf"), 4, "source-not-found"),
        (("show", "nope"), 3, "unknown-model"),
        (("show", "/no/such.gguf"), 5, "invalid-gguf"),
        (("rm", "nope", "--yes"), 3, "unknown-model"),
        (("rm", "qwen3-4b", "--yes"), 3, "model-not-pulled"),
        (("quantize", "qwen3-4b", "Q8_0"), 3, "model-not-pulled"),
        (("quantize", "qwen3-4b", "Q99"), 2, "usage"),
    ],
)
def test_errors_have_codes_and_no_traceback(argv, code, kind, capsys, as_json) -> None:
    assert as_json(*argv, code=code)["code"] == kind
    got, out, err = run(capsys, *argv)
    assert (got, out) == (code, "")
    assert "error: " in err
    assert "\nhint: " in err
    assert "Traceback" not in err


def test_progress_is_one_line_with_what_is_known() -> None:
    start = PullProgress(stage="downloading", file="x")
    now = replace(start, index=1, n_files=3, done_bytes=12_000_000, total_bytes=98_400_000)
    assert progress_text(now) == "downloading x (2 of 3): 12.0 MB of 98.4 MB"
    fast = replace(start, done_bytes=5_000, rate_bytes_per_s=3.1e6, left_s=200, note="why")
    assert progress_text(fast) == "downloading x: 5.0 kB, 3.1 MB/s, 3 min 20 s left: why"
    counted = replace(start, stage="quantizing", done_bytes=3, total_bytes=9)
    assert progress_text(counted) == "quantizing x: 3 of 9 tensors"


def test_plain_lines_are_few() -> None:
    out = io.StringIO()
    lines = ProgressLines(out, interval_s=3600)
    start = PullProgress(stage="downloading", file="x", total_bytes=100)
    for done in range(100):
        lines.report(replace(start, done_bytes=done))
    lines.report(replace(start, done_bytes=99, note="dropped"))
    lines.report(replace(start, stage="verifying"))
    assert len(out.getvalue().splitlines()) == 3


def test_progress_on_a_terminal_is_written_in_place() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    with progress_on(out) as report:
        job = Job(report)
        job.begin("downloading", "x.gguf", total=100)
        job.note("the connection was dropped")
        job.report(100)
        job.begin("verifying", "x.gguf", total=100)
    first, last = out.getvalue().split("\n")
    assert first.endswith("\x1b[Kdownloading x.gguf: the connection was dropped")
    assert "\x1b[Kverifying x.gguf" in last
    assert last.endswith("\r\x1b[K")
