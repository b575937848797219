"""Every error that edgeinfer raises on purpose.

Each class has a stable `code` (its name in kebab case) for `--json`, the endpoint and scripts.
`edgeinfer.error_text` has the exit status and hint of each class, and formats errors. Between processes
an error is passed as the strings of `to_fields`.

Only the standard library is used: the launcher imports this.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_by_code: dict[str, type[EdgeInferError]] = {}


def kebab(name: str) -> str:
    """Convert `ModelNotPulled` to `model-not-pulled`, without `re`, which would slow launches."""
    return "".join(f"-{c.lower()}" if c.isupper() else c for c in name).lstrip("-")


class EdgeInferError(Exception):
    """A failure without a more specific class; the base class of all errors.

    `message` says what happened. `hint` says what to do; None means the hint of the class in
    `error_text`. `details` are the names of the attributes that `to_fields` encodes next to `message`.
    """

    code = "edge-infer"
    details: tuple[str, ...] = ("hint",)

    def __init_subclass__(cls) -> None:
        if cls.__module__ == __name__:  # a subclass in another module has its parent's code
            cls.code = kebab(cls.__name__.removesuffix("Error"))
            _by_code[cls.code] = cls

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    @property
    def message_and_hint(self) -> str:
        """`MESSAGE (HINT)`, or only the message if `hint` is None or empty."""
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(EdgeInferError):
    """An invalid command line or request."""


class WrongScopeError(UsageError):
    """A load, launch or request option was given to a verb that does not accept it."""


class ConfigError(EdgeInferError):
    """A configuration file has an unknown key or a value of the wrong type."""


class CatalogError(EdgeInferError):
    """A model cannot be resolved, fetched or stored."""


class UnknownModelError(CatalogError):
    """The catalogue has no such model."""


class ModelNotPulledError(CatalogError):
    """The catalogue has this model, but its files are not pulled."""


class DownloadError(CatalogError):
    """A download failed; the fetched part is kept, so that the next pull continues it."""


class AuthenticationError(DownloadError):
    """The source requires a token, or an accepted licence."""


class SourceNotFoundError(DownloadError):
    """The source has no such file."""


class OfflineError(DownloadError):
    """The network is needed, but offline mode is on."""


class ChecksumError(CatalogError):
    """The content of a file does not match its expected checksum."""


class ModelBusyError(CatalogError):
    """Another process pulls, quantizes or removes this model, or writes the same output file."""


class InvalidGgufError(CatalogError):
    """The file is not a GGUF file, or contradicts its header."""


class ConversionError(CatalogError):
    """A checkpoint or an adapter cannot be converted to a GGUF file."""


class QuantizeError(CatalogError):
    """llama.cpp's quantizer failed."""


class DiskFullError(EdgeInferError):
    """Not enough disk space."""


class EngineError(EdgeInferError):
    """The engine failed."""


class ModelLoadError(EngineError):
    """llama.cpp could not load the model file or create a context."""


class OutOfMemoryError(EngineError):
    """Weights and context do not fit in memory."""


class InvalidRequestError(EngineError):
    """A request's field `param` is out of range or unsupported."""

    details: tuple[str, ...] = ("hint", "param")

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """The prompt (`n_tokens`), or prompt and answer, exceed the context (`n_ctx` tokens)."""

    details = ("hint", "param", "n_tokens", "n_ctx")

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        hint: str | None = None,
        n_tokens: int | str | None = None,
        n_ctx: int | str | None = None,
    ) -> None:
        super().__init__(message, param=param, hint=hint)
        # `from_fields` makes an error from texts, so a number may be a text here
        self.n_tokens = None if n_tokens is None else int(n_tokens)
        self.n_ctx = None if n_ctx is None else int(n_ctx)


class UnsupportedConstraintError(InvalidRequestError):
    """A schema or grammar cannot be enforced; `param` is the path of the unsupported field."""


class QueueFullError(EngineError):
    """Too many requests are running or waiting."""


class DecodeError(EngineError):
    """llama.cpp failed during a computation."""


class EngineClosedError(EngineError):
    """The engine is not running: it was closed, or its process died."""


class SnapshotError(EdgeInferError):
    """A snapshot could not be built or used."""


class SnapshotsUnavailableError(SnapshotError):
    """This machine cannot dump or restore processes."""


class SnapshotMissingError(SnapshotError):
    """There is no snapshot with these options."""


class SnapshotStaleError(SnapshotError):
    """The snapshot does not match this machine or its files; `key` names what differs."""

    details = ("hint", "key")

    def __init__(self, message: str, *, key: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.key = key


class SnapshotUnsafeError(SnapshotError):
    """A snapshot is a symlink, or has the wrong owner or mode, so it is never restored."""


class SnapshotCorruptError(SnapshotError):
    """A file of the snapshot is truncated or altered."""


class SnapshotUntrustedError(SnapshotError):
    """An imported snapshot is not signed, or signed with a key that the user does not trust."""


class DumpError(SnapshotError):
    """CRIU could not dump the process that has loaded the model."""


class RestoreError(SnapshotError):
    """CRIU could not restore the snapshot."""


class BlockDamagedError(EdgeInferError):
    """A file of the prefix cache is truncated or altered; it is not used."""


class ToolServerError(EdgeInferError):
    """A tool server cannot be started, violates the protocol, or has ended."""


class ServeError(EdgeInferError):
    """An endpoint cannot listen, cannot be reached, or answered with an error."""


class StoreError(EdgeInferError):
    """The conversations, or the daily counts of `drift`, cannot be read or written."""


class ShippingError(EdgeInferError):
    """The one-file program is invalid or damaged, or cannot be unpacked here."""


class ReceiptError(EdgeInferError):
    """A receipt is invalid, lacks its prompt and answer, or cannot be checked by this engine."""


class ReleaseUntrustedError(ShippingError):
    """A release is signed by an unknown key, is older than one seen before, or has expired."""


class InterruptedByUser(EdgeInferError):
    """The user pressed Ctrl-C; nothing is lost."""


def every_class() -> list[type[EdgeInferError]]:
    """List all error classes, a parent before its subclasses."""
    return [EdgeInferError, *_by_code.values()]


def to_fields(error: EdgeInferError) -> dict[str, str]:
    """Encode an error as strings for another process: code, message, and all `details` but None."""
    details = {name: getattr(error, name) for name in error.details}
    texts = {name: str(value) for name, value in details.items() if value is not None}
    return {"code": error.code, "message": error.message, **texts}


def from_fields(fields: Mapping[str, str | bytes]) -> EdgeInferError:
    """Decode the error that `to_fields` has encoded; an unknown code becomes an `EdgeInferError`."""
    text = {name: os.fsdecode(value) for name, value in fields.items()}
    cls = _by_code.get(text.get("code", ""), EdgeInferError)
    details = {name: text[name] for name in cls.details if name in text}
    return cls(text.get("message", ""), **details)
