"""Where things live, as strings for the launcher; the rest asks `edgeinfer.platform.paths`.

Linux follows the XDG base directory specification. `EDGEINFER_HOME` puts everything under one
directory. Nothing here makes a directory, and nothing here imports `pathlib`, which costs 12 ms of a
launch that takes 40.
"""

from __future__ import annotations

import os
import sys

#: The model of whoever names none, and the variable in which a shipped file names the one it carries.
DEFAULT_MODEL, BUNDLED_MODEL = "smollm2-135m-instruct", "EDGEINFER_BUNDLED_MODEL"
#: What the names of models in other programs' stores begin with: Ollama's, Hugging Face's, LM Studio's.
FOUND = ("ollama/", "hf:", "lmstudio/")
#: Where Ollama's clients look for it, and the variable that names another port.
OLLAMA_HOST, _OLLAMA_PORT = "127.0.0.1", 11434
_OLLAMA_VARIABLE = "EDGEINFER_OLLAMA_PORT"
_XDG = {
    "config": ("XDG_CONFIG_HOME", ".config"),
    "data": ("XDG_DATA_HOME", ".local/share"),
    "cache": ("XDG_CACHE_HOME", ".cache"),
    "state": ("XDG_STATE_HOME", ".local/state"),
}


TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def ollama_port(environment: Mapping[str, str] = os.environ) -> int:
    """Name the port of `serve --ollama`. A variable that is no port counts as none."""
    named = environment.get(_OLLAMA_VARIABLE, "")
    return int(named) if named.isdecimal() and 0 < int(named) <= 65_535 else _OLLAMA_PORT


def base(kind: str, environment: Mapping[str, str] = os.environ) -> str:
    """Name the directory of one kind of data ("config", "data", "cache", "state"), absolute.

    `environment` is that of the process whose directory it is.
    """
    home = environment.get("EDGEINFER_HOME")
    if home:
        return os.path.join(os.path.abspath(home), kind)
    if sys.platform != "linux":
        import platformdirs  # 6 ms; never on the Linux launch path

        return str(getattr(platformdirs, f"user_{kind}_dir")("edgeinfer", appauthor=False))
    variable, default = _XDG[kind]
    value = environment.get(variable, "")
    if not value.startswith("/"):
        value = os.path.join(environment.get("HOME") or os.path.expanduser("~"), default)
    return os.path.join(value, "edgeinfer")


def shared_with(environment: Mapping[str, str]) -> bool:
    """Tell whether a process with this environment has any of its directories where this one has it."""
    return any(base(kind, environment) == base(kind) for kind in _XDG)


def config_file() -> str:
    """`EDGEINFER_CONFIG`, else config.toml in the configuration directory."""
    return os.environ.get("EDGEINFER_CONFIG") or os.path.join(base("config"), "config.toml")


def adapters() -> str:
    """LoRA adapters, one GGUF file each."""
    return os.path.join(base("data"), "adapters")


def snapshots() -> str:
    """Snapshots, one folder each; 0700."""
    return os.path.join(base("cache"), "snapshots")


def runtime() -> str:
    """Name the place of sockets: `$XDG_RUNTIME_DIR/edgeinfer`, else under /tmp."""
    home = os.environ.get("EDGEINFER_HOME")
    if home:
        return os.path.join(os.path.abspath(home), "run")
    directory = os.environ.get("XDG_RUNTIME_DIR", "")
    if directory.startswith("/") and os.path.isdir(directory):
        return os.path.join(directory, "edgeinfer")
    shared = os.environ.get("TMPDIR", "/tmp")  # noqa: S108  whoever uses it checks: 0700, ours
    return os.path.join(shared, f"edgeinfer-{os.getuid()}")
