"""Paths of our folders. `EDGEINFER_HOME` puts them all below one folder.

On Linux they follow the XDG base directory specification. Functions ending in `_dir` return a `Path`,
functions ending in `_path` a str: importing `pathlib` would take 12 of a launch's 40 ms. Only
`make_folder` and `private_dir` create folders.
"""

from __future__ import annotations

import os
import stat
import sys

from edgeinfer.errors import SnapshotMissingError, SnapshotUnsafeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DEFAULT_MODEL = "smollm2-135m-instruct"
#: Hint for a file or folder of edgeinfer that this user may not read or write.
DENIED_HINT = (
    "check the permissions of this path and its folders, or set EDGEINFER_HOME to a folder of your own"
)
#: Environment variable by which the one-file program names the model that it contains.
BUNDLED_MODEL = "EDGEINFER_BUNDLED_MODEL"
#: The tag that Ollama adds to a model name without a tag.
LATEST = ":latest"
#: Prefixes of the names of other programs' models: Ollama's, Hugging Face's, LM Studio's.
EXTERNAL_PREFIXES = ("ollama/", "hf:", "lmstudio/")
_OLLAMA, _HUGGING_FACE, _LM_STUDIO = EXTERNAL_PREFIXES
#: Quantization that is chosen if only the repository is named, as in llama-server.
DEFAULT_QUANT = "Q4_K_M"
#: Address at which clients look for Ollama; EDGEINFER_OLLAMA_PORT names another port.
OLLAMA_HOST, _OLLAMA_PORT = "127.0.0.1", 11434
_OLLAMA_VARIABLE = "EDGEINFER_OLLAMA_PORT"
_XDG = {
    "config": ("XDG_CONFIG_HOME", ".config"),
    "data": ("XDG_DATA_HOME", ".local/share"),
    "cache": ("XDG_CACHE_HOME", ".cache"),
    "state": ("XDG_STATE_HOME", ".local/state"),
}


def ollama_port() -> int:
    """Return the port of `serve --ollama`; an invalid EDGEINFER_OLLAMA_PORT is ignored."""
    named = os.environ.get(_OLLAMA_VARIABLE, "")
    return int(named) if named.isdecimal() and 0 < int(named) <= 65_535 else _OLLAMA_PORT


def base(kind: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the folder for "config", "data", "cache" or "state" of a process with this environment."""
    home = environment.get("EDGEINFER_HOME")
    if home:
        return os.path.join(os.path.abspath(home), kind)
    if sys.platform != "linux":
        import platformdirs  # slow import (6 ms): never on Linux

        return str(getattr(platformdirs, f"user_{kind}_dir")("edgeinfer", appauthor=False))
    variable, default = _XDG[kind]
    value = environment.get(variable, "")
    if not value.startswith("/"):
        value = os.path.join(environment.get("HOME") or os.path.expanduser("~"), default)
    return os.path.join(value, "edgeinfer")


def shared_with(environment: Mapping[str, str]) -> bool:
    """Return whether a process with these environment variables shares a folder with this process.

    The folders are those that `base` returns.
    """
    return any(base(kind, environment) == base(kind) for kind in _XDG)


def is_model_path(text: str) -> bool:
    """Return whether `text` is a path: it ends in .gguf, or begins with `/`, `./`, `../` or `~`."""
    is_gguf = text.lower().endswith(".gguf") and ":" not in text
    return is_gguf or text.startswith(("/", "./", "../", "~"))


def model_spellings(text: str) -> tuple[str, ...]:
    """Return the model names that `text` may mean, in lower case, the likeliest first.

    `A/b` may mean `a/b`, `ollama/a/b`, `hf:a/b` and `hf:a/b:q4_k_m`.
    """
    plain = text.lower().removesuffix(LATEST)
    if plain.startswith((_OLLAMA, _LM_STUDIO)):
        return (plain,)
    for hub in (_HUGGING_FACE, "hf.co/", "huggingface.co/"):
        repository = plain.removeprefix(hub)
        if repository != plain:
            break
    on_hub = _HUGGING_FACE + repository
    return plain, _OLLAMA + plain, on_hub, f"{on_hub}:{DEFAULT_QUANT.lower()}"


def absolute_path(text: str) -> str:
    """Return an absolute path without `~`, `.` and `..`. Links are resolved only if there is a `..`."""
    path = os.path.expanduser(text)
    if not path.startswith("/"):
        path = os.path.join(os.getcwd(), path)
    if os.pardir in path.split("/"):
        path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    return os.path.normpath(path)


def config_file() -> str:
    """Return the path of config.toml, which `EDGEINFER_CONFIG` overrides."""
    return os.environ.get("EDGEINFER_CONFIG") or os.path.join(base("config"), "config.toml")


def adapters_path() -> str:
    """Return the folder of LoRA adapters, one GGUF file each."""
    return os.path.join(base("data"), "adapters")


def snapshots_path() -> str:
    """Return the folder of snapshots, one folder each (0700)."""
    return os.path.join(base("cache"), "snapshots")


def runtime_path() -> str:
    """Return the folder of sockets: `$XDG_RUNTIME_DIR/edgeinfer`, or a folder in /tmp."""
    home = os.environ.get("EDGEINFER_HOME")
    if home:
        return os.path.join(os.path.abspath(home), "run")
    directory = os.environ.get("XDG_RUNTIME_DIR", "")
    if directory.startswith("/") and os.path.isdir(directory):
        return os.path.join(directory, "edgeinfer")
    shared = os.environ.get("TMPDIR", "/tmp")  # noqa: S108  `private_dir` checks it
    return os.path.join(shared, f"edgeinfer-{os.getuid()}")


def _path(text: str) -> Path:
    from pathlib import Path  # slow import (12 ms): the launcher never calls this

    return Path(text)


def config_dir() -> Path:
    """Return the folder of config.toml, models.toml and the API key."""
    return _path(base("config"))


def data_dir() -> Path:
    """Return the folder of models and conversations: data that cannot be made again."""
    return _path(base("data"))


def cache_dir() -> Path:
    """Return the folder of snapshots and other data that can be made again."""
    return _path(base("cache"))


def state_dir() -> Path:
    """Return the folder of logs and histories."""
    return _path(base("state"))


def models_dir() -> Path:
    return data_dir() / "models"


def adapters_dir() -> Path:
    return _path(adapters_path())


def snapshots_dir() -> Path:
    return _path(snapshots_path())


def blocks_dir() -> Path:
    """Return the folder of the on-disk prefix cache (0700, because it contains prompts)."""
    return cache_dir() / "blocks"


def shipped_file(name: str) -> Path:
    return _path(__file__).parents[1] / "data" / name


def make_folder(path: Path) -> None:
    """Create `path` and its missing parents with mode 0700. Raises OSError.

    `mkdir(parents=True)` gives only the last folder this mode; others could be writable for a group.
    """
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def refuse_unsafe(path: str, *, directory: bool) -> os.stat_result:
    """Check that only this user can access a file or, with `directory`, a folder; return `os.lstat`.

    Raises SnapshotMissingError if the path cannot be read, SnapshotUnsafeError for a symlink, another
    owner, or a mode that gives other users access.
    """
    try:
        info = os.lstat(path)
    except OSError as error:
        raise SnapshotMissingError(f"{path} cannot be read: {error.strerror}") from error
    _refuse_access(info, path, directory=directory)
    return info


def _refuse_access(info: os.stat_result, path: str, *, directory: bool) -> None:
    if not (stat.S_ISDIR if directory else stat.S_ISREG)(info.st_mode):
        problem = f"{path} must be a {'directory' if directory else 'regular file'}"
        problem += ", not a symlink" if stat.S_ISLNK(info.st_mode) else ""
        raise SnapshotUnsafeError(problem, hint=f"remove or rename {path}")
    if info.st_uid != os.getuid():
        hint = f"run edgeinfer as that user, or rename {path}"
        raise SnapshotUnsafeError(f"{path} belongs to user {info.st_uid}, not to you", hint=hint)
    if info.st_mode & 0o077:
        problem = f"other users may access {path}: its mode must be {info.st_mode & 0o700:o}"
        raise SnapshotUnsafeError(problem, hint=f"chmod go= {path}")


def private_dir(path: Path) -> Path:
    """Create `path` if missing, for this user only (0700), and return it.

    Raises OSError, and SnapshotUnsafeError if `path` has another owner, a wider mode or is a symlink.
    """
    make_folder(path)
    _refuse_access(os.lstat(path), str(path), directory=True)
    return path
