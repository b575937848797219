"""Install a client into an environment of its own, in the build cache: a venv or an npm folder a client."""

import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def build_cache() -> Path:
    """Return the folder in which scripts/setup.sh keeps its builds."""
    named = os.environ.get("EDGEINFER_BUILD_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgeinfer-build"


def table() -> dict[str, dict[str, Any]]:
    """Return the clients of clients.toml by name."""
    return tomllib.loads((HERE / "clients.toml").read_text("utf-8"))


def install(name: str) -> Path:
    """Install a client, unless its pinned versions are there; return the folder of its programs.

    Raises CalledProcessError where pip or npm fails.
    """
    client = table()[name]
    folder = build_cache() / "clients" / name
    pins = client.get("python") or client["node"]
    stamp = folder / "pins"
    if not stamp.is_file() or stamp.read_text() != "\n".join(pins):
        folder.mkdir(parents=True, exist_ok=True)
        (_install_python if "python" in client else _install_node)(folder, pins)
        stamp.write_text("\n".join(pins))
    return programs(name)


def programs(name: str) -> Path:
    """Return the folder of an installed client's programs."""
    client = table()[name]
    usual = "bin" if "python" in client else "node_modules/.bin"
    return build_cache() / "clients" / name / client.get("programs", usual)


def _install_python(folder: Path, pins: list[str]) -> None:
    venv.create(folder, with_pip=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, *pins], check=True)


def _install_node(folder: Path, pins: list[str]) -> None:
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    npm = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
    subprocess.run([*npm, *pins], cwd=folder, check=True)


if __name__ == "__main__":
    for client_name in sys.argv[1:] or table():
        print(client_name, install(client_name), flush=True)
