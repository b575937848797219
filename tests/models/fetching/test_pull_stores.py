"""Pulls from S3, Google's buckets and container registries, which run as real servers."""

import hashlib
from collections.abc import Iterator

import pytest
from fake_hub import Fault
from made_checkpoints import make_checkpoint
from made_gguf import gguf_bytes, split_keys
from made_projectors import make_projector
from msgspec.structs import replace
from stores_here import docker_registry, moto, push

from edgeinfer.errors import (
    AuthenticationError,
    ChecksumError,
    DownloadError,
    InvalidGgufError,
    SourceNotFoundError,
)
from edgeinfer.models import sources, store
from edgeinfer.models.fetching import s3
from edgeinfer.models.progress import PullProgress
from edgeinfer.models.pull import pull
from edgeinfer.models.reference import resolve
from edgeinfer.platform import paths

from ...conftest import BUILD_CACHE

OLLAMA = "application/vnd.ollama.image.model"
DOCKER = "application/vnd.docker.ai.gguf.v3"


@pytest.fixture
def body() -> bytes:
    return gguf_bytes(tensors=[("token_embd.weight", 1 << 20)])


@pytest.fixture
def store_settings(monkeypatch) -> None:
    """Set S3 credentials, and disable the look-up of a cloud's metadata service."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/nonexistent",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    with moto() as url:
        yield url


@pytest.fixture
def bucket(s3_url, store_settings, monkeypatch):
    """Return a function that puts objects into a bucket of the S3 server."""
    import botocore.session

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_url)
    client = botocore.session.get_session().create_client("s3", region_name="us-east-1")
    client.create_bucket(Bucket="models")

    def put(key: str, content: bytes, **more: str) -> None:
        client.put_object(Bucket="models", Key=key, Body=content, **more)

    return put


def is_right(body: bytes, source: str) -> bool:
    record = resolve("tiny").pulled
    return record is not None and record.paths[0].read_bytes() == body and record.source == source


def test_object_of_s3(bucket, body, options, monkeypatch) -> None:
    bucket("a/tiny.gguf", body, ChecksumAlgorithm="SHA256", ACL="public-read")
    bucket("a/private.gguf", body)
    [remote] = s3.resolve(sources.StoredObject("models", "a/tiny.gguf"))
    assert remote.sha256 == hashlib.sha256(body).hexdigest()
    pull("s3://models/a/tiny.gguf", options=options)
    assert is_right(body, "s3://models/a/tiny.gguf")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    [remote] = s3.resolve(sources.StoredObject("models", "a/tiny.gguf"))
    assert "Signature" not in remote.url, "without credentials it is asked for anonymously"
    pull("s3://models/a/tiny.gguf", options=replace(options, again=True))
    with pytest.raises(AuthenticationError):
        pull("s3://models/a/private.gguf", options=replace(options, name="other"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with pytest.raises(SourceNotFoundError):
        pull("s3://models/a/other.gguf", options=replace(options, name="other"))


def test_checkpoint_of_s3(bucket, options, tmp_path) -> None:
    folder = make_checkpoint("llama3", tmp_path / "made", shards=2)
    for path in folder.iterdir():
        bucket(f"deep/tiny/{path.name}", path.read_bytes())
    bucket("empty/readme.md", b"nothing")
    record = pull("s3://models/deep/tiny/", options=options)
    assert (record.architecture, record.source) == ("llama", "s3://models/deep/tiny/")
    assert record.n_params > 1000
    with pytest.raises(SourceNotFoundError, match=r"config\.json"):
        pull("s3://models/empty/", options=replace(options, name="other"))


def test_googles_buckets_at_their_s3_endpoint(bucket, s3_url, body, options, monkeypatch) -> None:
    bucket("tiny.gguf", body)
    monkeypatch.setattr(s3, "_GOOGLE", s3_url)
    pull("gs://models/tiny.gguf", options=options)
    assert is_right(body, "gs://models/tiny.gguf")


def test_signed_address_is_named_without_its_signature(bucket, body, options) -> None:
    bucket("tiny.gguf", body)
    [remote] = s3.resolve(sources.StoredObject("models", "tiny.gguf"))
    pull(remote.url, options=options)
    record = resolve("tiny").pulled
    assert record is not None
    assert record.source == remote.url.partition("?")[0]
    assert b"ignature" not in (record.folder / store.RECORD).read_bytes()
    assert resolve(remote.url).pulled is not None


def test_object_whose_store_fails(server, store_settings, monkeypatch, body, options) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    server.files["/models/tiny.gguf"] = body
    server.faults.extend(Fault(cut_after=50_000 * i) for i in range(10))
    server.faults.append(Fault(status=403))  # the signed address has expired: a new one is used
    pull("s3://models/tiny.gguf", options=options)
    assert is_right(body, "s3://models/tiny.gguf")

    again = replace(options, again=True)
    partial = paths.models_dir() / ".partial/tiny/tiny.gguf.part"
    server.faults.extend(Fault(cut_after=100_000) for _ in range(8))
    server.always = Fault(status=403)
    with pytest.raises(AuthenticationError):
        pull("s3://models/tiny.gguf", options=again)
    assert not partial.exists(), "it is asked for before anything is fetched"
    server.always = Fault(extra_length=-8)
    server.faults.clear()
    with pytest.raises((ChecksumError, InvalidGgufError, DownloadError)):
        pull("s3://models/tiny.gguf", options=again)
    assert is_right(body, "s3://models/tiny.gguf")


@pytest.fixture
def registry(tmp_path) -> Iterator[str]:
    with docker_registry(BUILD_CACHE / "docker-registry", tmp_path) as address:
        yield address


@pytest.mark.parametrize("kind", [OLLAMA, DOCKER])
def test_artifact_of_a_registry(registry, body, options, kind) -> None:
    further = [("application/vnd.ollama.image.params", b"{}"), ("text/plain", b"a licence")]
    digest = push(registry, "library/tiny", "1b", [further[0], (kind, body), further[1]])
    seen: list[PullProgress] = []
    pull(f"oci://{registry}/library/tiny:1b", seen.append, options=options)
    assert is_right(body, f"oci://{registry}/library/tiny:1b")
    by_digest = f"oci://{registry}/library/tiny@{digest}"
    pull(by_digest, options=replace(options, again=True))
    assert is_right(body, by_digest)
    with pytest.raises(SourceNotFoundError, match="no such file"):
        pull(f"oci://{registry}/library/tiny:7b", options=replace(options, name="x"))


def test_projector_of_an_artifact_is_pulled_too(registry, body, options, tmp_path) -> None:
    projector = make_projector(tmp_path / "mmproj.gguf", "gemma3", 64).read_bytes()
    kind = "application/vnd.ollama.image.projector"
    push(registry, "library/tiny-vl", "1b", [(OLLAMA, body), (kind, projector)])
    record = pull(f"oci://{registry}/library/tiny-vl:1b", options=options)
    assert record.paths[0].read_bytes() == body
    assert (record.folder / "mmproj-tiny-vl-1b.gguf").read_bytes() == projector


def test_artifact_of_several_files_and_one_without(registry, options) -> None:
    parts = [gguf_bytes(split_keys(i, 2), [(f"blk.{i}.weight", 20_000)], seed=i) for i in range(2)]
    push(registry, "ai/tiny", "latest", [(DOCKER, shard) for shard in parts])
    record = pull(f"oci://{registry}/ai/tiny", options=options)
    assert [path.read_bytes() for path in record.paths] == parts
    push(registry, "ai/none", "latest", [("application/vnd.docker.ai.safetensors", b"x")])
    with pytest.raises(SourceNotFoundError, match="safetensors"):
        pull(f"oci://{registry}/ai/none", options=replace(options, name="x"))
