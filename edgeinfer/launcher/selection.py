"""Choose the snapshot to resume, by the command line's words and config.toml.

The launcher does not load the argument parser, which would take too long, so the choice may be wrong.
The resumed app parses the same arguments; if they mean another model or other options, the app loads
that model in a worker. So a wrong choice costs time, but never changes an answer.
"""

from __future__ import annotations

import os

from edgeinfer.config.load_options import LOAD_OPTIONS, first_difference
from edgeinfer.errors import (
    EdgeInferError,
    SnapshotCorruptError,
    SnapshotMissingError,
    SnapshotStaleError,
)
from edgeinfer.launcher.argv import CommandLine
from edgeinfer.platform import paths
from edgeinfer.snapshot_format import fingerprint, storage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class LaunchChoice:
    """The model and the load options that a snapshot must have for this launch.

    `options` has only values that differ from the default. `resume` is "auto", "always" (never
    start cold) or "never"; `snapshot` is the value of `--snapshot`, "" without it.
    """

    def __init__(self, model: str, options: dict[str, str], resume: str, snapshot: str = "") -> None:
        self.model = model
        self.options = options
        self.resume = resume
        self.snapshot = snapshot

    @property
    def warm_hint(self) -> str:
        """Hint of a cold start: the `edgeinfer warm` command that builds the missing snapshot."""
        return f"`{_warm_command(self.model, self.options)}` builds it now"

    def find(self) -> tuple[str, storage.Manifest]:
        """Return folder and manifest of the snapshot to resume. Raises SnapshotError if there is none.

        With `--snapshot`, the search is that of `find_named`, otherwise that of `find`.
        """
        if self.snapshot:
            return find_named(self.snapshot, self.model, self.options)
        return find(self.model, self.options)


def warm_flags(options: dict[str, str]) -> dict[str, str]:
    """Return flag → value for an `edgeinfer warm` that builds a snapshot with these `options`.

    An option that `options` lacks has its default. The flag of such an option is returned only if
    config.toml sets the option.
    """
    configured = read_config().get("load", {})
    rows = [row for row in LOAD_OPTIONS if row.field in options or row.key in configured]
    return {r.flag: options.get(r.field, str(r.default)) for r in rows if r.flag and r.of_snapshot}


def _warm_command(model: str, options: dict[str, str], name: str = "") -> str:
    flags = warm_flags(options) | ({"--name": name} if name else {})
    return " ".join(["edgeinfer warm", model, *(f"{flag} {value}" for flag, value in flags.items())])


def launch_choice(line: CommandLine) -> LaunchChoice:
    """Return the choice in a command line and config.toml; options with invalid values are left out."""
    config = read_config()
    snapshot = line.value("--snapshot")
    load = {} if snapshot else config.get("load", {})
    options = {}
    for option in (option for option in LOAD_OPTIONS if option.of_snapshot):
        values = line.values(option.flag) or [str(load.get(option.key, option.default))]
        try:
            value = option.parse(",".join(values if option.many else values[-1:]))
        except ValueError:
            continue  # the app's parser refuses the value with an error
        if value != option.default:
            options[option.field] = str(value)
    bundled = os.environ.get(paths.BUNDLED_MODEL)
    default = str(config.get("default-model") or bundled or paths.DEFAULT_MODEL)
    by_age = reversed(storage.generations().items())
    folders = {storage.model_prefix_of(name): newest for name, (newest, *_) in by_age}
    warm = _find_warm(line.first_word, folders)
    # if the named model has no snapshot, do not resume the default model's snapshot, which would not
    # help
    model = warm or line.named_model or _find_warm(default, folders) or default
    resume = line.value("--resume") or "auto"
    return LaunchChoice(model, options, "always" if snapshot else resume, snapshot)


def _find_warm(word: str, folders: dict[str, str]) -> str:
    """Return the full name of the model that `word` means; "" if `folders` has no snapshot of it."""
    if not word:
        return ""
    spellings = (word, *paths.model_spellings(word))
    for spelling in spellings:
        if storage.model_prefix(spelling) in folders:
            return spelling
    if "/" in word and not paths.is_model_path(word):
        return _name_of_source(word, spellings, folders)
    name, _, quantization = word.partition(":")
    folder = folders.get(storage.model_prefix(name))
    record = _record_path(storage.model_prefix(word))
    # if a model was pulled under the name `m:q4`, the word does not mean quantization q4 of model m
    if not quantization or folder is None or os.path.exists(record):
        return ""
    try:
        keys = storage.read_manifest(folder).keys
    except (EdgeInferError, OSError):
        return ""
    return name if keys.get(storage.QUANTIZATION) == quantization.upper() else ""


def _record_path(folder: str) -> str:
    return f"{paths.base('data')}/models/{folder}/model.json"


def _name_of_source(word: str, spellings: tuple[str, ...], folders: dict[str, str]) -> str:
    """Return the name of the model in `folders` that was pulled from the source `word`; "" for none.

    The records (model.json) are searched as text, because importing `json` would delay each launch.
    Letter case does not matter in Hugging Face's `spellings` ("hf:…").
    """
    sources = (f'"{word}"', f'"{word}{paths.LATEST}"')
    on_hub = [f'"{spelling}"' for spelling in spellings if spelling.startswith("hf:")]
    for folder in folders:
        try:
            with open(_record_path(folder), encoding="utf-8") as file:
                record = file.read()
        except (OSError, ValueError):
            continue
        lower = record.lower()
        if any(text in record for text in sources) or any(text in lower for text in on_hub):
            return folder.replace("+", ":")
    return ""


def read_config() -> dict[str, Any]:
    """Return `default-model` and the tables of config.toml; {} if the file is missing or invalid.

    Errors in the file are left to the app, which reports them.
    """
    path = paths.config_file()
    if not os.path.exists(path):
        return {}
    import tomllib  # slow import (15 ms): only if the file exists

    try:
        with open(path, "rb") as file:
            config = tomllib.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return {
        key: value for key, value in config.items() if key == "default-model" or type(value) is dict
    }


def find(model: str, options: dict[str, str]) -> tuple[str, storage.Manifest]:
    """Return folder and manifest of the newest snapshot that fits, preferably with exactly `options`.

    Only snapshots of `model` by this installation that no user has named are considered. If one of
    them was refused, the reason is raised (such as SnapshotStaleError), otherwise SnapshotMissingError.
    """
    root, prefix = paths.snapshots_path(), storage.model_prefix(model)
    by_name = storage.generations(root, fingerprint.program_tag())
    folders = [  # the newest first
        newest
        for name, (newest, *_) in by_name.items()
        if storage.model_prefix_of(name) == prefix and not storage.user_name_of(name)
    ]
    if folders:
        _refuse_unsafe(root)
    fitting: list[tuple[str, storage.Manifest]] = []
    refused: EdgeInferError | None = None
    for folder in folders:
        try:
            manifest = storage.read_manifest(folder)
        except EdgeInferError as error:
            refused = error
            continue
        if not first_difference(options, manifest.requested, manifest.actual):
            fitting.append((folder, manifest))
    for folder, manifest in sorted(fitting, key=lambda pair: pair[1].requested != options):
        try:
            fingerprint.refuse_stale(manifest, folder)
        except EdgeInferError as error:
            refused = refused or error
            continue
        return folder, manifest
    typed = " ".join(f"{flag} {value}" for flag, value in warm_flags(options).items())
    missing = f"with {typed or 'the configured load options'}" if folders else "yet"
    raise refused or SnapshotMissingError(f"{model} has no snapshot {missing}")


def find_named(snapshot: str, model: str, options: dict[str, str]) -> tuple[str, storage.Manifest]:
    """Return folder and manifest of the snapshot with this full name or this user-given name.

    Of equal user-given names, that of a snapshot of `model` is preferred. Raises SnapshotMissingError
    unless exactly one snapshot has the name and fits `options`. If that snapshot is refused, the reason
    is raised, such as SnapshotStaleError.
    """
    root = paths.snapshots_path()
    by_name = storage.generations(root, fingerprint.program_tag())
    matching = storage.matching_names(by_name, snapshot, model)
    if len(matching) > 1:
        hint = f"name one of: {', '.join(matching)}"
        raise SnapshotMissingError(f"several snapshots are called {snapshot}", hint=hint)
    if not matching:
        names = ", ".join(sorted(by_name))
        hint = f"name one of: {names}" if names else "`edgeinfer warm MODEL --name NAME` builds one"
        raise SnapshotMissingError(f"there is no snapshot called {snapshot}", hint=hint)
    name = matching[0]
    _refuse_unsafe(root)
    manifest = storage.read_manifest(by_name[name][0])
    field = first_difference(options, manifest.requested, manifest.actual, is_named=True)
    if field:
        flag = next(row.flag for row in LOAD_OPTIONS if row.field == field)
        had = manifest.requested.get(field) or manifest.actual.get(field, "none")
        command = _warm_command(manifest.model, manifest.requested | options, "NAME")
        raise SnapshotMissingError(
            f"the snapshot {name} was made with {flag} {had}, not {flag} {options[field]}",
            hint=f"leave {flag} out, or build another: `{command}`",
        )
    try:
        fingerprint.refuse_stale(manifest, by_name[name][0])
    except (SnapshotCorruptError, SnapshotMissingError, SnapshotStaleError) as error:
        command = _warm_command(manifest.model, manifest.requested, storage.user_name_of(name))
        error.hint = f"build it again: `{command}`"
        raise
    return by_name[name][0], manifest


def _refuse_unsafe(root: str) -> None:
    paths.refuse_unsafe(root, directory=True)
    storage.refuse_unsafe_ancestors(root)
