"""Which names, digests, file names and sources are accepted."""

from collections.abc import Callable

import pytest

from edgeinfer.errors import UsageError
from edgeinfer.models import names, sources
from edgeinfer.models.reference import find
from edgeinfer.platform import paths


@pytest.mark.parametrize(
    ("check", "text", "name"),
    [
        *((names.model_name, name, name) for name in ("a", "qwen3-0.6b", "x_y", "a" * 96)),
        (names.check_file_name, "a/b/x.gguf", "x.gguf"),
        (names.parse_digest, "SHA256:" + "Ab" * 32, "ab" * 32),
    ],
)
def test_good_text_is_taken(check: Callable[[str], str], text: str, name: str) -> None:
    assert check(text) == name


def test_reference_has_a_folder_of_its_own() -> None:
    assert names.pulled_folder(names.parse_reference("Qwen3-4B")) == paths.models_dir() / "qwen3-4b"
    folder = names.pulled_folder(names.parse_reference("qwen3-4b:q8_0"))
    assert folder == paths.models_dir() / "qwen3-4b+q8_0"
    assert str(names.parse_reference("qwen3-4b:q8_0")) == "qwen3-4b:Q8_0"


@pytest.mark.parametrize(
    ("text", "name"),
    [("/x/My Model (v2).gguf", "My-Model-v2-.gguf"), ("../..x..y", "x.y"), ("ü ber.gguf", "ber.gguf")],
)
def test_file_names_are_sanitized(text: str, name: str) -> None:
    assert names.sanitize_file_name(text) == name
    assert names.check_file_name(name) == name


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("hf:Qwen/Qwen3-4B-GGUF:q4_k_m", sources.HubQuant("Qwen/Qwen3-4B-GGUF", "Q4_K_M")),
        ("Qwen/Qwen3-4B-GGUF:Q4_K_M", sources.HubQuant("Qwen/Qwen3-4B-GGUF", "Q4_K_M")),
        ("hf:a/b@v1.0:Q8_0", sources.HubQuant("a/b", "Q8_0", "v1.0")),
        ("a/b", sources.HubQuant("a/b", "Q4_K_M")),
        ("hf:a/b@main", sources.HubQuant("a/b", "Q4_K_M")),
        ("hf:a/b/sub/x.gguf", sources.HubFile("a/b", "sub/x.gguf")),
        ("hf:a/b@refs/x.gguf", sources.HubFile("a/b", "x.gguf", "refs")),
        ("https://h.example/m.gguf?x=1", sources.Url("https://h.example/m.gguf?x=1")),
        ("file:/m/x.gguf", sources.LocalFile("/m/x.gguf")),
        ("file:///m/x%20y.gguf", sources.LocalFile("/m/x y.gguf")),
        ("wheel:n-a==1.0/p/x.gguf", sources.WheelFile("n-a", "1.0", "p/x.gguf")),
        ("oci://h.example/library/m3.2:1b", sources.OciArtifact("h.example", "library/m3.2", "1b")),
        ("oci://docker.io/ai/m", sources.OciArtifact("docker.io", "ai/m", "latest")),
        ("gs://bucket/a/b.gguf", sources.StoredObject("bucket", "a/b.gguf", "gs")),
    ],
)
def test_sources(text: str, source: sources.Source) -> None:
    assert sources.parse(text) == source
    assert sources.parse(str(source)) == source


BAD = {
    names.model_name: [
        *r". .. -a .a a. a/b a\b a..b A ü a+b ~a".split(),
        "",
        "a b",
        "a\0b",
        "a" * 97,
        "a\n",
    ],
    names.parse_reference: ["x:", "x:Q9", "x:../y", ":Q8_0", "x:Q8_0:Q8_0"],
    names.parse_digest: ["", "ab" * 31, "zz" * 32, "../" + "a" * 61, "a" * 65],
    names.check_file_name: ["", "a/", "..", "a/..", ".hidden", "a/x y", "x\0", "x\n", "a" * 201],
    sources.parse: [
        *"x hf:x hf:a/b:Q9 hf:a/../x.gguf hf:a/b/../x.gguf hf:a/b//x hf:a/b@../x:Q8_0".split(),
        *"https:///x http://[::1/x https://a..b/x https://h:99999999/x https://h:0/x".split(),
        "https://h/x y",
        *"https://user@h/x https://h/x#y wheel:n/x wheel:n==1/../x wheel:-n==1/x".split(),
        *"s3://bucket s3://bucket/../x.gguf oci://here oci://h/Name:x gs:x".split(),
        "wheel:n==--index-url/x y/../z",
        "",
    ],
}


@pytest.mark.parametrize(("check", "text"), [(check, text) for check in BAD for text in BAD[check]])
def test_bad_text_is_refused(check: Callable[[str], object], text: str) -> None:
    with pytest.raises(UsageError):
        check(text)


def test_sources_are_recognized() -> None:
    assert paths.is_model_path("./x")
    assert paths.is_model_path("x.gguf")
    assert not paths.is_model_path("qwen3-4b")
    assert not paths.is_model_path("hf:a/b/x.gguf")
    assert sources.looks_like_source("a/b:Q8_0")
    assert not sources.looks_like_source("qwen3-4b:Q8_0")


def test_names_are_told_from_prompts(smollm2):
    assert all(map(find, ("smollm2-135m-instruct", "qwen3-0.6b:Q4_K_M", str(smollm2))))
    prompts = "hello", "Name three colours.", "what is 2:3?", "./absent.gguf", "/etc/passwd", ""
    assert not any(map(find, prompts))
