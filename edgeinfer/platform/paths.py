"""Where things live, as paths; `edgeinfer.platform.places` knows, and tells the launcher in strings.

Linux follows the XDG base directory specification (what platformdirs gives; a test compares the two).
`EDGEINFER_HOME` puts everything under one directory. Whoever writes makes directories, with
`private_dir`.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from edgeinfer.errors import SnapshotUnsafeError
from edgeinfer.platform import places


def config_dir() -> Path:
    """config.toml, models.toml, the API key."""
    return Path(places.base("config"))


def data_dir() -> Path:
    """Models and conversations: what a user would miss."""
    return Path(places.base("data"))


def cache_dir() -> Path:
    """Snapshots and compiled things: what can be made again."""
    return Path(places.base("cache"))


def state_dir() -> Path:
    """Logs and histories."""
    return Path(places.base("state"))


def models_dir() -> Path:
    """Pulled models, one folder each."""
    return data_dir() / "models"


def adapters_dir() -> Path:
    """LoRA adapters, one GGUF file each."""
    return Path(places.adapters())


def snapshots_dir() -> Path:
    """Snapshots, one folder each; 0700."""
    return Path(places.snapshots())


def blocks_dir() -> Path:
    """Computed blocks, which hold what was said; 0700."""
    return cache_dir() / "blocks"


def runtime_dir() -> Path:
    """The folder of sockets and process records, under $XDG_RUNTIME_DIR or /tmp."""
    return Path(places.runtime())


def shipped_file(name: str) -> Path:
    """A file that comes with the program."""
    return Path(__file__).parents[1] / "data" / name


def private_dir(path: Path) -> Path:
    """Make `path` if needed and return it; it belongs to this user alone (0700, no symlink).

    Raises SnapshotUnsafeError when it exists with another owner, a wider mode, or as a symlink.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise SnapshotUnsafeError(
            f"{path} must be a directory of this user with mode 0700, and no symlink",
            hint=f"chmod 700 {path}",
        )
    return path
