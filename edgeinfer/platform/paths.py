"""Paths of data, cache, state and configuration. `EDGEINFER_HOME` puts all below one directory.

On Linux they follow the XDG base directory specification, as platformdirs does (a test compares the
two). Functions ending in `_dir` return a `Path`, those ending in `_path` return text for the launcher,
because `pathlib` costs 12 ms of a launch that takes 40. Only `private_dir` creates a directory.
"""

from __future__ import annotations

import os
import stat
import sys

from edgeinfer.errors import SnapshotUnsafeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

#: The default model, and the variable in which a shipped file names the model inside it.
DEFAULT_MODEL, BUNDLED_MODEL = "smollm2-135m-instruct", "EDGEINFER_BUNDLED_MODEL"
#: Prefixes of model names in external stores: Ollama's, Hugging Face's, LM Studio's.
EXTERNAL_PREFIXES = ("ollama/", "hf:", "lmstudio/")
#: Address where Ollama's clients look for it, and the variable for another port.
OLLAMA_HOST, _OLLAMA_PORT = "127.0.0.1", 11434
_OLLAMA_VARIABLE = "EDGEINFER_OLLAMA_PORT"
_XDG = {
    "config": ("XDG_CONFIG_HOME", ".config"),
    "data": ("XDG_DATA_HOME", ".local/share"),
    "cache": ("XDG_CACHE_HOME", ".cache"),
    "state": ("XDG_STATE_HOME", ".local/state"),
}


def ollama_port(environment: Mapping[str, str] = os.environ) -> int:
    """Return the port of `serve --ollama`; an invalid variable is ignored."""
    named = environment.get(_OLLAMA_VARIABLE, "")
    return int(named) if named.isdecimal() and 0 < int(named) <= 65_535 else _OLLAMA_PORT


def base(kind: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the absolute directory for a kind of data ("config", "data", "cache", "state").

    `environment` is that of the process to which the directory belongs.
    """
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
    """Return whether a process with this environment shares one of our directories."""
    return any(base(kind, environment) == base(kind) for kind in _XDG)


def config_file() -> str:
    """Return `EDGEINFER_CONFIG`, otherwise config.toml in the configuration directory."""
    return os.environ.get("EDGEINFER_CONFIG") or os.path.join(base("config"), "config.toml")


def adapters_path() -> str:
    """Return the folder of LoRA adapters, one GGUF file each."""
    return os.path.join(base("data"), "adapters")


def snapshots_path() -> str:
    """Return the folder of snapshots, one folder each (0700)."""
    return os.path.join(base("cache"), "snapshots")


def runtime_path() -> str:
    """Return the folder of sockets: `$XDG_RUNTIME_DIR/edgeinfer`, otherwise one under /tmp."""
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
    """Return the folder of models and conversations: data that a user would miss."""
    return _path(base("data"))


def cache_dir() -> Path:
    """Return the folder of snapshots and other data that can be made again."""
    return _path(base("cache"))


def state_dir() -> Path:
    """Return the folder of logs and histories."""
    return _path(base("state"))


def models_dir() -> Path:
    """Return the folder of pulled models, one folder each."""
    return data_dir() / "models"


def adapters_dir() -> Path:
    return _path(adapters_path())


def snapshots_dir() -> Path:
    return _path(snapshots_path())


def blocks_dir() -> Path:
    """Return the folder of the on-disk prefix cache (0700): it holds prompts."""
    return cache_dir() / "blocks"


def shipped_file(name: str) -> Path:
    return _path(__file__).parents[1] / "data" / name


def private_dir(path: Path) -> Path:
    """Create `path` if missing, and return it. Only this user can access it (0700, no symlink).

    Raises SnapshotUnsafeError if it exists with another owner, a wider mode, or as a symlink.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        problem = f"{path} must be a directory owned by this user with mode 0700, not a symlink"
        raise SnapshotUnsafeError(problem, hint=f"chmod 700 {path}")
    return path
