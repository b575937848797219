"""The exit status and hint of each error class, and errors as text for people.

A class without a row uses its parent's row. A hint that contains names or paths is passed to the
error's constructor (`hint=`).
"""

from __future__ import annotations

from collections.abc import Iterable

from edgeinfer import errors as e
from edgeinfer.safe_text import without_controls

#: Error class → exit status, and hint: what to do next. Exit statuses: 1 failure, 2 usage, 3 model not
#: here, 4 network, 5 verification, 6 disk or memory full, 7 snapshot, 8 engine, 130 interrupted;
#: `verify` also uses 9 (within tolerance) and 10 (no receipt checked).
TABLE: dict[type[e.EdgeInferError], tuple[int, str]] = {
    e.EdgeInferError: (1, "run `edgeinfer doctor` to see what works on this machine"),
    e.UsageError: (2, "run the command with `--help` to see its arguments"),
    e.WrongScopeError: (2, "use the option with a command that accepts it"),
    e.ConfigError: (2, "correct or remove the named line or key of the configuration file"),
    e.CatalogError: (3, "run `edgeinfer list` to see the models"),
    e.UnknownModelError: (3, "run `edgeinfer list` to see the models"),
    e.ModelNotPulledError: (3, "pull the model first: `edgeinfer pull MODEL`"),
    e.DownloadError: (4, "check network and proxy, and run the command again; fetched parts are kept"),
    e.AuthenticationError: (4, "accept the model's licence on its page, set HF_TOKEN and pull again"),
    e.SourceNotFoundError: (4, "check the name or address (`edgeinfer show MODEL` lists sources)"),
    e.OfflineError: (
        4,
        "unset EDGEINFER_OFFLINE and HF_HUB_OFFLINE, remove `offline` from config.toml, or import a "
        "local file: `edgeinfer pull FILE.gguf`",
    ),
    e.ChecksumError: (5, "pull again; if the checksum still differs, do not trust the source"),
    e.ModelBusyError: (3, "wait for the other command to end, then try again"),
    e.InvalidGgufError: (5, "download the file again from a source you trust"),
    e.ConversionError: (5, "use a repository that has GGUF files of this model"),
    e.QuantizeError: (8, "try another type: `edgeinfer quantize --help` lists them"),
    e.DiskFullError: (
        6,
        "free disk space (`edgeinfer rm MODEL`, `edgeinfer snapshots prune`) and repeat the command",
    ),
    e.EngineError: (8, "try again; if it fails again, report it with the output of `edgeinfer doctor`"),
    e.ModelLoadError: (8, "pull the model again; if that does not help, try another quantization"),
    e.OutOfMemoryError: (6, "use a smaller context (`--ctx 2048`) or a smaller model"),
    e.InvalidRequestError: (2, "correct the request; /openapi.json of an endpoint lists all fields"),
    e.UnsupportedConstraintError: (2, "change the schema, tool or grammar, or request free text"),
    e.ContextLengthError: (8, "shorten the prompt, or load with a larger context (`--ctx N`)"),
    e.QueueFullError: (8, "try again in a moment"),
    e.EngineClosedError: (8, "run the command again, which loads the model again"),
    e.SnapshotError: (7, "run `edgeinfer snapshots list` to see which snapshots can be used"),
    e.SnapshotsUnavailableError: (7, "run `edgeinfer doctor` to see what snapshots need"),
    e.SnapshotMissingError: (7, "build the snapshot: `edgeinfer warm MODEL`"),
    e.SnapshotStaleError: (7, "build the snapshot again: `edgeinfer warm MODEL`"),
    e.SnapshotUnsafeError: (7, "remove the snapshot: `edgeinfer snapshots rm NAME`"),
    e.SnapshotCorruptError: (7, "build the snapshot again: `edgeinfer warm MODEL`"),
    e.SnapshotUntrustedError: (7, "trust the signer's key: `edgeinfer snapshots trust FINGERPRINT`"),
    e.DumpError: (7, "run `edgeinfer doctor` to see what snapshots need; meanwhile launches are cold"),
    e.RestoreError: (7, "build the snapshot again: `edgeinfer warm MODEL`"),
    e.StoreError: (1, "check that the named file can be read and written, then try again"),
    e.ServeError: (1, "check the address, and that the server runs there"),
    e.BlockDamagedError: (1, "no action is needed: the block is deleted and prefilled again"),
    e.ToolServerError: (1, "run `edgeinfer tools` to see what each server answers"),
    e.ShippingError: (1, "run `edgeinfer doctor --verify`, or download the file again"),
    e.ReleaseUntrustedError: (5, "nothing was changed; do not install this release by hand either"),
    e.ReceiptError: (
        5,
        '`edgeinfer run --receipt FILE` writes one; requests with the field `"receipt": true` get one',
    ),
    e.InterruptedByUser: (130, ""),
}


def row(kind: type[e.EdgeInferError]) -> tuple[int, str]:
    """Return the exit status and hint of an error class; those of its parent if TABLE lacks it."""
    return next(TABLE[cls] for cls in kind.__mro__ if cls in TABLE)


def hint(error: e.EdgeInferError) -> str:
    """Return the error's own hint, otherwise the hint of its class; "" if there is none."""
    return error.hint if error.hint is not None else row(type(error))[1]


def similar_name_hint(word: str, names: Iterable[str], otherwise: str) -> str:
    """Return the hint "did you mean NAME?" for the name nearest to `word`; `otherwise` if none is."""
    import difflib  # not at the top: the shipped file's first stage does not contain it

    near = difflib.get_close_matches(word.lower(), names, n=1)
    return f"did you mean {near[0]}?" if near else otherwise


def exit_code(error: e.EdgeInferError) -> int:
    """Return the exit code of a process that ends with this error."""
    return row(type(error))[0]


def describe_error(error: e.EdgeInferError) -> str:
    """Format an error for stderr: `error: …`, an empty line, `hint: …`.

    Terminal escapes are removed. "error:" is left out if the user stopped the command.
    """
    step = hint(error)
    prefix = "" if isinstance(error, e.InterruptedByUser) else "error: "
    return without_controls(f"{prefix}{error.message}" + (f"\n\nhint: {step}" if step else ""))
