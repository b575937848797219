"""Every error edgeinfer raises on purpose.

    EdgeInferError
    ├── UsageError                    the command line or a request names something that cannot be
    │   └── WrongTimeError            an option given at load, launch or request time that belongs to another
    ├── ConfigError                   config.toml or models.toml: file, key and the nearest valid key
    ├── CatalogError
    │   ├── UnknownModelError         no such name in the catalogue
    │   ├── ModelNotPulledError       known, but its files are not here
    │   ├── DownloadError             a source failed; what was fetched is kept
    │   │   ├── AuthenticationError   401/403: a token or an accepted licence is missing
    │   │   ├── SourceNotFoundError   404, no such package, no such file
    │   │   └── OfflineError          the offline switch is on
    │   ├── ChecksumError             the bytes are not the ones promised; never published
    │   ├── ModelBusyError            another process pulls, quantizes or removes this model
    │   ├── InvalidGgufError          the header does not fit the file
    │   └── QuantizeError             llama.cpp's quantizer refused or died
    ├── DiskFullError                 no room; names the bytes needed and free
    ├── EngineError
    │   ├── ModelLoadError            llama.cpp could not load the file or make a context
    │   ├── OutOfMemoryError          weights and context do not fit
    │   ├── InvalidRequestError       a field of a generation request; carries `param`
    │   │   ├── ContextLengthError    prompt (and answer) exceed the context
    │   │   └── UnsupportedConstraintError   a schema or grammar that cannot be honoured
    │   ├── QueueFullError            the bounded queue is full; try again later
    │   ├── DecodeError               llama_decode failed
    │   └── EngineClosedError         the engine is shutting down or its process died
    ├── SnapshotError
    │   ├── SnapshotsUnavailableError this machine cannot dump or restore: names the reason
    │   ├── SnapshotMissingError      no snapshot fits these options
    │   ├── SnapshotStaleError        the manifest differs from this machine; names the key
    │   ├── SnapshotUnsafeError       wrong owner, mode, or a symlink: never restored
    │   ├── SnapshotCorruptError      a file of it is truncated or altered
    │   ├── DumpError                 CRIU could not dump
    │   └── RestoreError              CRIU could not restore
    ├── ServeError                    the endpoint cannot bind, or may not
    ├── StoreError                    the conversation store
    └── InterruptedByUser             Ctrl-C; nothing is lost

Each leaf has a stable `code` (its name in kebab case) that `--json`, the endpoint and scripts may rely
on. The words for a person come from one table in `edgeinfer.error_text`, the exit codes from another;
nothing else formats an error.
"""

from __future__ import annotations


def _kebab(name: str) -> str:
    """`ModelNotPulledError` → `model-not-pulled`. Without `re`, which the launcher would pay for."""
    return "".join(f"-{c.lower()}" if c.isupper() else c for c in name.removesuffix("Error")).lstrip(
        "-"
    )


class EdgeInferError(Exception):
    """The root. `message` says what happened; `hint`, when set, overrides the table's next command to
    type.
    """

    code = "edge-infer"

    def __init_subclass__(cls) -> None:
        cls.code = _kebab(cls.__name__)

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(EdgeInferError):
    """The command line or a request names something that cannot be."""


class WrongTimeError(UsageError):
    """An option given at load, launch or request time that belongs to another time."""


class ConfigError(EdgeInferError):
    """A configuration file has an unknown key or a value of the wrong type."""


class CatalogError(EdgeInferError):
    """The catalogue or the model store."""


class UnknownModelError(CatalogError):
    """No such name in the catalogue."""


class ModelNotPulledError(CatalogError):
    """The catalogue knows this model, but its files are not here."""


class DownloadError(CatalogError):
    """A source failed; what was fetched is kept."""


class AuthenticationError(DownloadError):
    """The source wants a token, or a licence accepted."""


class SourceNotFoundError(DownloadError):
    """The source has no such file."""


class OfflineError(DownloadError):
    """The offline switch is on and the network would be needed."""


class ChecksumError(CatalogError):
    """The bytes are not the ones promised."""


class ModelBusyError(CatalogError):
    """Another process pulls, quantizes or removes this model."""


class InvalidGgufError(CatalogError):
    """The file's header is not a GGUF header that fits the file."""


class QuantizeError(CatalogError):
    """llama.cpp's quantizer refused or died."""


class DiskFullError(EdgeInferError):
    """No room on the disk."""


class EngineError(EdgeInferError):
    """The engine."""


class ModelLoadError(EngineError):
    """llama.cpp could not load the file or make a context."""


class OutOfMemoryError(EngineError):
    """Weights and context do not fit in memory."""


class InvalidRequestError(EngineError):
    """A field of a request is out of range or unsupported. `param` is its name, as the request spells
    it.
    """

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """The prompt, or prompt and answer, exceed the context."""


class UnsupportedConstraintError(InvalidRequestError):
    """A schema or grammar that cannot be honoured; `param` is the place in it."""


class QueueFullError(EngineError):
    """The bounded queue is full."""


class DecodeError(EngineError):
    """llama_decode failed."""


class EngineClosedError(EngineError):
    """The engine is shutting down, or its process died."""


class SnapshotError(EdgeInferError):
    """A snapshot."""


class SnapshotsUnavailableError(SnapshotError):
    """This machine cannot dump or restore."""


class SnapshotMissingError(SnapshotError):
    """No snapshot fits these options."""


class SnapshotStaleError(SnapshotError):
    """The manifest differs from this machine. `key` names what differs."""

    def __init__(self, message: str, *, key: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.key = key


class SnapshotUnsafeError(SnapshotError):
    """Wrong owner, wrong mode, or a symlink: never restored."""


class SnapshotCorruptError(SnapshotError):
    """A file of the snapshot is truncated or altered."""


class DumpError(SnapshotError):
    """CRIU could not dump the parked process."""


class RestoreError(SnapshotError):
    """CRIU could not restore the snapshot."""


class ServeError(EdgeInferError):
    """The endpoint cannot bind, or may not."""


class StoreError(EdgeInferError):
    """The conversation store."""


class InterruptedByUser(EdgeInferError):
    """Ctrl-C; nothing is lost."""
