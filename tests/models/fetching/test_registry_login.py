"""Registry credentials are sent only to the registry and its token service, and only by HTTPS."""

import base64
import json
from collections.abc import Callable, Iterator

import httpx2
import pytest

from edgeinfer.errors import DownloadError, OfflineError
from edgeinfer.models.fetching.oci import Registry, connect, resolve
from edgeinfer.models.sources import OciArtifact

LOGIN = base64.b64encode(b"me:pass").decode()
SOURCE = OciArtifact("registry.example.org", "people/small", "a")
Answer = Callable[[httpx2.Request], httpx2.Response]


@pytest.fixture(autouse=True)
def _logged_in(tmp_path, monkeypatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"auths": {SOURCE.registry: {"auth": LOGIN}}}))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))


def sent_requests(answer: Answer) -> list[tuple[str, str]]:
    """Upload to a registry; return origin and Authorization header of each request."""
    seen = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        origin = f"{request.url.scheme}://{request.url.host}"
        seen.append((origin, request.headers.get("Authorization", "")))
        return answer(request)

    with httpx2.Client(transport=httpx2.MockTransport(handle), follow_redirects=True) as client:
        try:
            Registry(SOURCE, client).put_blob("sha256:" + "0" * 64, 3, iter([b"abc"]))
        except DownloadError as error:
            seen.append(("refused", error.message))
    return seen


def registry(location: str, challenge: str = "Basic") -> Answer:
    """Return a registry that sends uploads to `location`, and challenges a client without a login."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        if "/token" in request.url.path:
            return httpx2.Response(200, json={"token": "given"})
        if request.method == "PUT":
            return httpx2.Response(201)
        if "Authorization" not in request.headers:
            return httpx2.Response(401, headers={"WWW-Authenticate": challenge})
        return httpx2.Response(202, headers={"Location": location})

    return answer


@pytest.mark.parametrize(
    ("origin", "login"),
    [("https://registry.example.org", f"Basic {LOGIN}"), ("https://store.example.net", "")],
)
def test_upload_is_logged_in_only_at_the_registry(origin: str, login: str) -> None:
    assert sent_requests(registry(f"{origin}/uploads/1"))[-1] == (origin, login)


def test_another_host_cannot_ask_for_the_login() -> None:
    elsewhere = "https://store.example.net"

    def answer(request: httpx2.Request) -> httpx2.Response:
        if str(request.url).startswith(elsewhere):
            return httpx2.Response(401, headers={"WWW-Authenticate": "Basic"})
        return registry(f"{elsewhere}/uploads/1")(request)

    assert [login for origin, login in sent_requests(answer) if origin == elsewhere] == [""]


def test_upload_in_the_open_is_refused() -> None:
    *asked, refusal = sent_requests(registry("http://registry.example.org/uploads/1"))
    assert "redirects to an unencrypted address" in refusal[1]
    assert {origin for origin, _ in asked} == {"https://registry.example.org"}


@pytest.mark.parametrize(
    ("realm", "login"),
    [
        ("https://registry.example.org/token", f"Basic {LOGIN}"),
        ("https://auth.example.org/token", f"Basic {LOGIN}"),
        ("https://example.net/token", ""),
    ],
)
def test_token_service_of_another_domain_sees_no_login(realm: str, login: str) -> None:
    seen = sent_requests(registry("/v2/uploads/1", f'Bearer realm="{realm}",service="here"'))
    assert (realm.removesuffix("/token"), login) in seen
    assert seen[-1] == ("https://registry.example.org", "Bearer given")


def test_token_service_in_the_open_is_refused() -> None:
    challenge = 'Bearer realm="http://registry.example.org/token"'
    *asked, refusal = sent_requests(registry("/v2/uploads/1", challenge))
    assert "token endpoint is not HTTPS" in refusal[1]
    assert len(asked) == 1


def test_registry_is_not_opened_offline(monkeypatch) -> None:
    monkeypatch.setenv("EDGEINFER_OFFLINE", "1")
    with pytest.raises(OfflineError, match="offline mode is on"), connect(SOURCE):
        pass


def test_blob_that_is_refused_hints_at_the_registrys_login() -> None:
    with connect(SOURCE) as registry:
        remote = registry.blob({"digest": "ab" * 32, "size": 3}, "small.gguf")
    assert remote.login == "log in first: `docker login registry.example.org`"


def test_invalid_digest_of_a_registry_is_no_mistake_of_the_user(monkeypatch) -> None:
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:12", "size": 3}
    monkeypatch.setattr(Registry, "manifest", lambda *_: {"layers": [layer]})
    with pytest.raises(DownloadError, match="manifest is invalid: 'sha256:12' is not a SHA-256"):
        resolve(SOURCE)


def test_missing_key_of_a_manifest_is_named(monkeypatch) -> None:
    layer = {"mediaType": "application/vnd.ollama.image.model", "size": 3}
    monkeypatch.setattr(Registry, "manifest", lambda *_: {"layers": [layer]})
    with pytest.raises(DownloadError, match="manifest is invalid: it lacks 'digest'"):
        resolve(SOURCE)


class Endless(httpx2.SyncByteStream):
    """A body without an end that counts the bytes that were read."""

    def __init__(self) -> None:
        self.n_read = 0

    def __iter__(self) -> Iterator[bytes]:
        while True:
            self.n_read += 1 << 20
            yield b" " * (1 << 20)


@pytest.mark.parametrize("operation", ["manifest", "token", "refusal", "upload"])
def test_endless_answer_is_not_read_to_its_end(operation: str) -> None:
    body = Endless()

    def handle(request: httpx2.Request) -> httpx2.Response:
        if operation == "token" and "/token" not in request.url.path:
            challenge = f'Bearer realm="https://{SOURCE.registry}/token",service="s"'
            return httpx2.Response(401, headers={"WWW-Authenticate": challenge})
        return httpx2.Response(404 if operation == "refusal" else 200, stream=body)

    with httpx2.Client(transport=httpx2.MockTransport(handle), follow_redirects=True) as client:
        store = Registry(SOURCE, client)
        with pytest.raises(DownloadError, match="more than 4 MiB"):
            store.put_manifest(b"{}") if operation == "upload" else store.manifest("a")
    assert body.n_read <= 8 << 20
