"""`edgeinfer config`: show the path of config.toml, and every key with its value."""

from __future__ import annotations

import argparse

import msgspec

from edgeinfer.cli.result import Result
from edgeinfer.config.config_file import Config, config_path
from edgeinfer.host import EngineHost


class ConfigResult(Result, frozen=True, kw_only=True):
    """The configuration: every key with its value. `exists`: whether there is a file at `path`.

    Values of tool servers' variables and headers are hidden as secrets.
    """

    path: str
    exists: bool
    config: Config

    def human(self) -> str:
        import tomlkit  # slow import: 20 ms

        values = msgspec.to_builtins(self.config)
        origin = self.path if self.exists else f"{self.path} (no such file: these are the defaults)"
        return f"# {origin}\n{tomlkit.dumps(values)}".rstrip()


def run(_options: argparse.Namespace, host: EngineHost) -> ConfigResult:
    """Show the configuration. Raises ConfigError if the file has a mistake."""
    path = config_path()
    return ConfigResult(path=str(path), exists=path.is_file(), config=_without_secrets(host.config))


def _without_secrets(config: Config) -> Config:
    replace = msgspec.structs.replace
    servers = {
        name: replace(
            server, env=dict.fromkeys(server.env, "…"), headers=dict.fromkeys(server.headers, "…")
        )
        for name, server in config.tools.servers.items()
    }
    return replace(config, tools=replace(config.tools, servers=servers))
