"""Pull models from container registries, and store snapshots there.

A manifest lists layers by media type and digest, which is the SHA-256 of the file. The logins of docker
and podman are used. Protocol: https://github.com/opencontainers/distribution-spec.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urljoin

import httpx2  # slow import (75 to 120 ms): only a pull imports this module
import msgspec

from edgeinfer.errors import ChecksumError, DownloadError, SourceNotFoundError, UsageError
from edgeinfer.models import names
from edgeinfer.models.fetching import download, http_client
from edgeinfer.models.fetching.download import Remote
from edgeinfer.models.progress import Job
from edgeinfer.models.sources import OciArtifact

#: Media types of layers with GGUF weights: Ollama's, Docker's and ModelPack's. A layer of the last type
#: (raw) counts only if its file is named `.gguf`.
_WEIGHTS = (
    "application/vnd.ollama.image.model",
    "application/vnd.docker.ai.gguf.v3",
    "application/vnd.cncf.model.weight.v1.gguf",
    "application/vnd.cncf.model.weight.v1.raw",
)
#: Media types of layers with a projector.
_PROJECTORS = ("application/vnd.ollama.image.projector", "application/vnd.docker.ai.mmproj")
_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    *_INDEXES,
)
_TITLES = ("org.opencontainers.image.title", "org.cncf.model.filepath")
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
#: Host of Docker Hub's registry, which users call docker.io.
_HUB = "registry-1.docker.io"
_TIMEOUT_S = 60.0


@contextmanager
def connect(source: OciArtifact) -> Iterator[Registry]:
    """Open a client for a registry. Raises OfflineError, DownloadError if the connection fails."""
    try:
        with http_client.client(str(source), _TIMEOUT_S) as client:
            yield Registry(source, client)
    except httpx2.TransportError as error:
        raise DownloadError(f"{source}: {http_client.describe_transport_error(error)}") from error


def resolve(source: OciArtifact) -> list[Remote]:
    """Return the GGUF files of a model in a registry, then its projector if it has one.

    Raises AuthenticationError, SourceNotFoundError, DownloadError, ChecksumError for a wrong manifest.
    """
    try:
        with connect(source) as registry:
            manifest = registry.manifest(source.reference)
            if manifest.get("mediaType") in _INDEXES or "manifests" in manifest:
                manifest = registry.manifest(manifest["manifests"][0]["digest"])
            layers = _weights(source, manifest)
            file_names = _file_names(source, layers)
            remotes = [registry.blob(*pair) for pair in zip(layers, file_names, strict=True)]
            encoders = [layer for layer in manifest["layers"] if layer["mediaType"] in _PROJECTORS]
            for layer in encoders[:1]:
                remote = registry.blob(layer, f"mmproj-{names.sanitize_file_name(source.stem)}.gguf")
                remotes.append(msgspec.structs.replace(remote, is_projector=True))
            return remotes
    except (KeyError, IndexError, TypeError, ValueError, UsageError) as error:
        problem = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        message = f"{source}: the registry's manifest is invalid: {problem}"
        raise DownloadError(message, hint=http_client.OTHER_SOURCE) from error


def _weights(source: OciArtifact, manifest: dict[str, Any]) -> list[dict[str, Any]]:
    layers = manifest.get("layers", [])
    weights = [layer for layer in layers if _is_weights(layer)]
    if not weights:
        kinds = ", ".join(sorted({layer["mediaType"] for layer in layers})) or "(none)"
        raise SourceNotFoundError(f"{source} has no GGUF file, only layers of the types {kinds}")
    return weights


def _is_weights(layer: dict[str, Any]) -> bool:
    if layer["mediaType"] == "application/vnd.cncf.model.weight.v1.raw":
        return _title(layer).endswith(".gguf")
    return layer["mediaType"] in _WEIGHTS


def _title(layer: dict[str, Any]) -> str:
    titles = layer.get("annotations") or {}
    return next((str(titles[key]) for key in _TITLES if key in titles), "")


def _file_names(source: OciArtifact, layers: list[dict[str, Any]]) -> list[str]:
    stem = names.sanitize_file_name(source.stem)
    if len(layers) == 1:
        return [f"{stem}.gguf"]
    return [f"{stem}-{i:05d}-of-{len(layers):05d}.gguf" for i in range(1, len(layers) + 1)]


class Answer(NamedTuple):
    """A registry's answer, completely read; `url` is the address after redirects."""

    status_code: int
    headers: httpx2.Headers
    url: httpx2.URL
    content: bytes


class Registry:
    """A client for one repository of a registry. It logs in if the registry asks for a token."""

    def __init__(self, source: OciArtifact, client: httpx2.Client) -> None:
        host = _HUB if source.registry in ("docker.io", "index.docker.io") else source.registry
        # like Docker, use HTTP for a registry on this machine
        scheme = "http" if http_client.is_loopback(host) else "https"
        self.base = f"{scheme}://{host}/v2/{source.repository}"
        self._url = httpx2.URL(self.base)
        self._source = source
        self._client = client
        self._authorization = ""
        self._login = f"log in first: `docker login {source.registry}`"

    def manifest(self, reference: str) -> dict[str, Any]:
        """Return the manifest with this tag or digest. Raises ValueError if it is not a JSON object."""
        manifest = json.loads(self.manifest_content(reference))
        if not isinstance(manifest, dict):
            raise ValueError("the manifest is not a JSON object")
        return manifest

    def manifest_content(self, reference: str = "") -> bytes:
        """Return the bytes of the manifest with this tag or digest; "" stands for the source's.

        Raises ChecksumError if `reference` is a digest that the content does not have.
        """
        reference = reference or self._source.reference
        url = f"{self.base}/manifests/{reference}"
        content = self.send("GET", url, {"Accept": ", ".join(_MANIFESTS)}).content
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if reference.startswith("sha256:") and digest != reference:
            raise ChecksumError(f"{self._source}: the registry serves {digest} instead of {reference}")
        return content

    def blob(self, layer: dict[str, Any], file_name: str) -> Remote:
        """Describe the download of a manifest's layer, whose file will be named `file_name`.

        Raises UsageError if the layer has an invalid digest, KeyError or ValueError if its digest or
        size is missing.
        """
        digest = str(layer["digest"])
        return Remote(
            url=f"{self.base}/blobs/{digest}",
            file_name=file_name,
            origin=f"oci://{self._source.registry}/{self._source.repository}@{digest}",
            size_bytes=int(layer["size"]),
            sha256=names.parse_digest(digest),
            headers={"Authorization": self._authorization} if self._authorization else {},
            login=self._login,
        )

    # --- the methods of `snapshots.transfer.image.ImageStore`, which stores exported snapshots

    def read_blob(self, digest: str, _size: int) -> bytes:
        return self.send("GET", f"{self.base}/blobs/{digest}", {}).content

    def fetch_blob(self, digest: str, size: int, folder: Path, job: Job) -> Path:
        remote = self.blob({"digest": digest, "size": size}, names.parse_digest(digest))
        job.begin("downloading", digest, total=size)
        return download.fetch(remote, folder, job)

    def has_blob(self, digest: str, size: int) -> bool:
        response = self.send("HEAD", f"{self.base}/blobs/{digest}", {}, accepted=(200, 404))
        return response.status_code == 200 and response.headers.get("Content-Length") == str(size)

    def put_blob(self, digest: str, size: int, chunks: Iterator[bytes]) -> None:
        start = f"{self.base}/blobs/uploads/"
        upload = self.send("POST", start, {"Content-Length": "0"}, accepted=(202,))
        url = urljoin(str(upload.url), upload.headers.get("Location", ""))
        url += f"{'&' if '?' in url else '?'}digest={digest}"
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        self.send("PUT", url, headers, chunks, accepted=(201,))

    def put_manifest(self, content: bytes) -> None:
        url = f"{self.base}/manifests/{self._source.reference}"
        self.send("PUT", url, {"Content-Type": _MANIFESTS[0]}, content, accepted=(200, 201))

    def send(
        self,
        method: str,
        url: str,
        headers: dict[str, str],
        content: bytes | Iterator[bytes] | None = None,
        accepted: tuple[int, ...] = (200,),
    ) -> Answer:
        """Send a request and return the answer; log in and send again if the registry asks for a token.

        Raises AuthenticationError, SourceNotFoundError or DownloadError for a status not in `accepted`.
        """
        response = self._ask(method, url, headers, content)
        if response.status_code == 401 and self._is_registry_host(response.url):
            challenge = response.headers.get("WWW-Authenticate", "")
            self._authorization = self._authorize(challenge)
            response = self._ask(method, url, headers, content)
        if response.status_code in accepted:
            return response
        raise http_client.status_error(str(self._source), "registry", response.status_code, self._login)

    def _ask(
        self, method: str, url: str, headers: dict[str, str], content: bytes | Iterator[bytes] | None
    ) -> Answer:
        target = httpx2.URL(url)  # the address of an upload comes from the registry
        http_client.refuse_downgrade(str(self._source), self._url, target)
        all_headers = {"User-Agent": "edgeinfer"} | headers
        if self._authorization and self._is_registry_host(target):
            all_headers["Authorization"] = self._authorization
        return self._read(method, target, headers=all_headers, content=content)

    def _read(self, method: str, url: httpx2.URL, **request: Any) -> Answer:
        with self._client.stream(method, url, **request) as response:
            content = http_client.read_small(response, str(self._source))
            return Answer(response.status_code, response.headers, response.url, content)

    def _is_registry_host(self, url: httpx2.URL) -> bool:
        """Return whether an address is on the registry's host: only that host gets its credentials."""
        return (url.scheme, url.host, url.port) == (self._url.scheme, self._url.host, self._url.port)

    def _authorize(self, challenge: str) -> str:
        kind, _, parameters_text = challenge.partition(" ")
        login = _login(self._source.registry)
        if kind.lower() == "basic":
            return f"Basic {login}" if login else ""
        parameters = dict(_CHALLENGE.findall(parameters_text))
        realm = httpx2.URL(parameters.pop("realm", ""))
        if kind.lower() != "bearer" or not realm.host:
            return ""
        if realm.scheme != "https" and not self._is_registry_host(realm):
            problem = f"{self._source}: the registry's token endpoint is not HTTPS: {realm}"
            raise DownloadError(problem, hint=http_client.OTHER_SOURCE)
        query = {key: parameters[key] for key in ("service", "scope") if key in parameters}
        trusted = login and _same_owner(realm.host, self._url.host)
        headers = {"Authorization": f"Basic {login}"} if trusted else {}
        response = self._read("GET", realm, params=query, headers=headers)
        if response.status_code != 200:
            return ""
        answer = json.loads(response.content)
        token = answer.get("token") or answer.get("access_token") or ""
        return f"Bearer {token}" if token else ""


def _same_owner(host: str, other: str) -> bool:
    """Return whether two hosts are in one domain, such as auth.docker.io and registry-1.docker.io."""
    domain = host.split(".")[-2:]
    return host == other or (domain == other.split(".")[-2:] and not domain[-1].isdigit())


def _login(registry: str) -> str:
    """Return a registry's credentials (base64) from `docker login` or `podman login`; "" for none."""
    home = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    podman = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nonexistent") / "containers/auth.json"
    hub = registry in ("docker.io", "index.docker.io", _HUB)
    keys = ["https://index.docker.io/v1/", "docker.io"] if hub else [registry, f"https://{registry}"]
    named = os.environ.get("REGISTRY_AUTH_FILE")
    for login_file in [Path(named)] if named else [home, podman]:
        try:
            logins = json.loads(login_file.read_bytes())["auths"]
            return next(str(logins[key]["auth"]) for key in keys if key in logins)
        except (OSError, ValueError, KeyError, TypeError, StopIteration):
            continue
    return ""
