"""Writing what a person changed into config.toml, keeping their comments and order."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from edgeinfer.config.config_file import config_path, load_config
from edgeinfer.errors import ConfigError


def save(keys: tuple[str, ...], value: Any, path: Path | None = None) -> None:
    """Set a key, e.g. `("chat", "theme")`; None removes it. Raises ConfigError, and changes nothing."""
    import tomlkit  # 30 ms, and only a changed setting needs it

    file = path or config_path()
    try:
        document = tomlkit.parse(file.read_text("utf-8")) if file.exists() else tomlkit.document()
        table: Any = document
        for key in keys[:-1]:
            table = table.setdefault(key, tomlkit.table())
        if value is None:
            table.pop(keys[-1], None)
        else:
            table[keys[-1]] = value
        _replace(file, tomlkit.dumps(document))
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror}", hint="the setting holds until you leave"
        ) from error
    except tomlkit.exceptions.TOMLKitError as error:
        raise ConfigError(f"{file}: {error}") from error


def _replace(file: Path, text: str) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=file.parent, prefix=".config-", suffix=".toml")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as out:
            out.write(text)
        load_config(Path(name))
        os.replace(name, file.resolve())
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
