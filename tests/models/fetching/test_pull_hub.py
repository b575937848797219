"""Pulls from Hugging Face, played by a local server: quantizations, splits, tokens, gates, pins."""

import msgspec
import pytest
from fake_hub import Fault, sha
from made_gguf import gguf_bytes
from made_projectors import make_projector

from edgeinfer import error_text
from edgeinfer.errors import (
    AuthenticationError,
    ChecksumError,
    DownloadError,
    ModelNotPulledError,
    SourceNotFoundError,
    UsageError,
)
from edgeinfer.models import names, store
from edgeinfer.models.progress import PullProgress
from edgeinfer.models.pull import PullOptions, pull
from edgeinfer.models.reference import resolve

from ..conftest import HASTY, write_models_toml

REPO = "someone/Tiny-GGUF"
TOKEN = "hf_not_a_real_token"


@pytest.fixture
def body() -> bytes:
    return gguf_bytes(tensors=[("token_embd.weight", 50_000)])


@pytest.fixture
def repo(server, body, monkeypatch) -> dict[str, bytes]:
    monkeypatch.setenv("HF_ENDPOINT", server.url + "/")
    files = {
        "README.md": b"# Tiny",
        "Tiny-Q8_0.gguf": body,
        "tiny.Q4_K_M.gguf": gguf_bytes(seed=4),
        "big/Tiny-F16-00001-of-00002.gguf": gguf_bytes(tensors=[("a", 800)], seed=1),
        "big/Tiny-F16-00002-of-00002.gguf": gguf_bytes(tensors=[("b", 800)], seed=2),
    }
    server.repos[REPO] = files
    return files


@pytest.fixture
def options() -> PullOptions:
    return PullOptions(retry_policy=HASTY)


def cdn(server, name: str) -> list:
    return server.gets(f"/cdn/{REPO}/{name}")


def test_projector_of_the_repository_is_pulled_too(repo, body, options, tmp_path) -> None:
    projector = make_projector(tmp_path / "mmproj.gguf", "gemma3", 64).read_bytes()
    repo["mmproj-Tiny-Q8_0.gguf"] = projector
    repo["mmproj-Tiny-F32.gguf"] = projector + bytes(64)
    record = pull(f"{REPO}:q8_0", options=options)
    assert record.projector is not None
    assert record.size_bytes == len(body) + len(projector)
    path = record.folder / "mmproj-Tiny-Q8_0.gguf"
    assert path.read_bytes() == projector
    assert resolve(record.name).files().projector == str(path)
    assert pull(f"{REPO}:q8_0", options=options) == record
    path.unlink()
    with pytest.raises(ModelNotPulledError, match="a file of someone"):
        resolve(record.name).files()
    assert pull(f"{REPO}:q8_0", options=options).projector is not None
    assert path.read_bytes() == projector


@pytest.mark.parametrize("quant", ["q8_0", "F16"])
def test_same_files_of_another_repository_are_here_already(repo, server, options, quant) -> None:
    server.repos["other/Tiny"] = {name.replace("iny", "INY"): body for name, body in repo.items()}
    options = msgspec.structs.replace(options, name="mine")
    record = pull(f"{REPO}:{quant}", options=options)
    n_served = server.served
    again = pull(f"other/Tiny:{quant}", options=options)
    assert (again.source, again.more_sources) == (record.source, (f"hf:other/Tiny:{quant.upper()}",))
    assert resolve(f"hf.co/other/tiny:{quant}").name == "mine"
    assert server.served - n_served < record.size_bytes // 2
    for source, problem in (
        (f"{REPO}:Q4_K_M", f"hf:{REPO}:Q4_K_M has another file"),
        (f"{server.url}/x.gguf", f"{server.url}/x.gguf has no SHA-256 to compare"),
    ):
        with pytest.raises(UsageError, match=f"mine is here already, from {record.source}; {problem}"):
            pull(source, options=options)
    if quant == "q8_0":
        options = msgspec.structs.replace(options, sha256=record.sha256)
        notes: list[PullProgress] = []
        again = pull(f"{server.url}/x.gguf", notes.append, options=options)
        assert f"{server.url}/x.gguf" in again.more_sources
        assert f"{server.url}/x.gguf was not fetched: mine has this SHA-256" in notes[-1].note


@pytest.mark.parametrize("wrong", ["none", "wide"])
def test_projector_that_does_not_fit_is_left_out(repo, options, tmp_path, wrong) -> None:
    wide = make_projector(tmp_path / "mmproj.gguf", "gemma3", 128).read_bytes()
    repo["mmproj-Tiny-Q8_0.gguf"] = wide if wrong == "wide" else b"no projector"
    notes: list[PullProgress] = []
    record = pull(f"{REPO}:q8_0", notes.append, options=options)
    assert record.projector is None
    assert any("the projector is left out" in note.note for note in notes)
    assert [path.name for path in sorted(record.folder.iterdir())] == ["Tiny-Q8_0.gguf", "model.json"]
    assert resolve(record.name).files().projector == ""


def test_quantization_or_file_is_found_at_the_branchs_commit(server, repo, body, options) -> None:
    record = pull(f"{REPO}:q8_0", options=options)
    assert record.name == "someone.tiny-gguf-q8_0"
    assert record.paths[0].read_bytes() == body
    assert record.source == f"hf:{REPO}:Q8_0"
    assert resolve(f"{REPO}:Q8_0").files().sha256 == sha(body)
    resolved = [seen.path for seen in server.seen if "/resolve/" in seen.path]
    assert resolved
    assert all("/resolve/0123456789abcdef" in path for path in resolved)
    file = pull(f"hf:{REPO}/Tiny-Q8_0.gguf", options=options)
    assert file.paths[0].read_bytes() == body


def test_split_model_is_fetched_whole(server, repo, options) -> None:
    record = pull(f"{REPO}:F16", options=options)
    parts = [repo[f"big/Tiny-F16-0000{n}-of-00002.gguf"] for n in (1, 2)]
    assert [path.read_bytes() for path in record.paths] == parts


def test_drops_are_continued_through_a_fresh_redirect(server, repo, body, options) -> None:
    server.faults.extend([Fault(cut_after=60_000), Fault(cut_after=60_000)])
    record = pull(f"{REPO}:Q8_0", options=options)
    assert record.paths[0].read_bytes() == body
    ranges = [seen.headers.get("range") for seen in cdn(server, "Tiny-Q8_0.gguf")]
    assert ranges == [None, "bytes=60000-", "bytes=120000-"]


def test_hubs_sha256_is_checked_on_the_first_pull(server, repo, options) -> None:
    server.always = Fault(wrong_byte_at=100_000)
    with pytest.raises(ChecksumError, match="its source"):
        pull(f"{REPO}:Q8_0", options=options)
    assert store.list_pulled() == []


def test_hubs_sha256_that_is_not_the_expected_one_is_refused_before_a_download(server, repo, options):
    options = msgspec.structs.replace(options, sha256="0" * 64)
    with pytest.raises(ChecksumError, match=f"not the expected {'0' * 64}") as caught:
        pull(f"{REPO}:Q8_0", options=options)
    assert "--sha256" in (caught.value.hint or "")
    assert cdn(server, "Tiny-Q8_0.gguf") == []


def test_gated_repository_says_what_to_do(server, repo, options) -> None:
    server.gated.add(REPO)
    with pytest.raises(AuthenticationError) as caught:
        pull(f"{REPO}:Q8_0", options=options)
    assert f"https://huggingface.co/{REPO}" in (caught.value.hint or "")
    assert "HF_TOKEN" in (caught.value.hint or "")


def test_token_opens_the_gate_and_stays_on_the_hub(server, repo, body, options, monkeypatch) -> None:
    server.gated.add(REPO)
    server.tokens.add(TOKEN)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    record = pull(f"{REPO}:Q8_0", options=options)
    assert record.paths[0].read_bytes() == body
    at_home = [seen for seen in server.seen if not seen.path.startswith("/cdn/")]
    assert at_home
    assert all(seen.headers["authorization"] == f"Bearer {TOKEN}" for seen in at_home)
    assert all("authorization" not in seen.headers for seen in cdn(server, "Tiny-Q8_0.gguf"))
    assert TOKEN not in (record.folder / "model.json").read_text()


@pytest.mark.parametrize(
    ("source", "error", "hint"),
    [
        ("someone/else:Q8_0", AuthenticationError, "check that there is https://huggingface.co/some"),
        (f"hf:{REPO}/none.gguf", SourceNotFoundError, "the repository has Tiny-Q8_0.gguf, "),
        (f"{REPO}:IQ4_XS", SourceNotFoundError, "the repository has F16, Q4_K_M, Q8_0"),
    ],
)
def test_absent_repository_or_file_is_answered_with_a_hint(repo, options, source, error, hint) -> None:
    with pytest.raises(error) as caught:
        pull(source, options=options)
    assert (caught.value.hint or "").startswith(hint)


def test_missing_part(server, repo, options) -> None:
    del repo["big/Tiny-F16-00002-of-00002.gguf"]
    with pytest.raises(SourceNotFoundError, match="only 1 of the 2 parts"):
        pull(f"{REPO}:F16", options=options)


def test_endpoint_that_is_not_there(monkeypatch, options) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match="cannot be reached"):
        pull(f"{REPO}:Q8_0", options=options)


def test_next_source_is_tried_or_all_are_named(server, repo, body, options) -> None:
    write_models_toml("tiny", "hf:no/body:Q8_0", "hf:not/there:Q8_0")
    with pytest.raises(DownloadError, match=r"no/body.*not/there"):
        pull("tiny", options=options)
    write_models_toml("tiny", "hf:no/body:Q8_0", f"hf:{REPO}:Q8_0")
    notes = []
    record = pull("tiny", lambda now: notes.append(now.note), options=options)
    assert record.source == f"hf:{REPO}:Q8_0"
    assert record.paths[0].read_bytes() == body
    assert any("trying the next source" in note for note in notes)


def test_another_quantization_of_a_catalogue_model(server, repo, options) -> None:
    write_models_toml("tiny", f"hf:{REPO}:Q8_0", quantization="Q8_0")
    record = pull("tiny:q4_k_m", options=options)
    assert record.name == "tiny:Q4_K_M"
    assert record.base == "tiny"
    assert record.folder.name == "tiny+q4_k_m"
    assert resolve("tiny:Q4_K_M").files().paths == (str(record.paths[0]),)


@pytest.mark.parametrize(
    ("path", "quant"),
    [
        ("a/x-Q4_K_M.gguf", "Q4_K_M"),
        ("x.q8_0.gguf", "Q8_0"),
        ("X-IQ3_XXS-00001-of-00002.gguf", "IQ3_XXS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4_MOE"),
        ("nomic-embed-text-v1.5.f16.gguf", "F16"),
        ("mmproj-x-Q8_0.gguf", ""),
        ("x.gguf", ""),
        ("x-Q8_0.bin", ""),
        ("imatrix.dat", ""),
    ],
)
def test_quantizations_in_file_names(path: str, quant: str) -> None:
    assert names.quantization_of(path) == quant


def test_a_hub_that_cannot_be_reached_suggests_to_check_the_network(monkeypatch, options) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(DownloadError, match="cannot be reached") as failed:
        pull(f"{REPO}:q8_0", options=options)
    assert error_text.hint(failed.value).startswith("check network and proxy, and run")
