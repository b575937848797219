"""`edgeinfer version`: show the versions of this program and its components."""

from __future__ import annotations

import argparse
import platform
from typing import Any

import msgspec

from edgeinfer import __version__
from edgeinfer.cli.parser import add_option
from edgeinfer.cli.result import Result
from edgeinfer.cli.terminal import table
from edgeinfer.errors import ShippingError
from edgeinfer.host import EngineHost
from edgeinfer.shipping import shipped


class VersionResult(Result, frozen=True, kw_only=True):
    """Versions of components. `llama_cpp_flags` are instruction sets that llama.cpp uses.

    `kernels` is the variant of edgeinfer's kernels ("v3", "v3-vnni", "v4"; on arm64 "dotprod", "i8mm"),
    and `kernels_version` a hash of their sources. Both are "" if llama.cpp's kernels are used. If the
    hash changes, results may differ in the last bits, and cached prefixes are not used.
    """

    edgeinfer: str
    python: str
    llama_cpp_python: str
    llama_cpp: str
    llama_cpp_commit: str
    llama_cpp_flags: tuple[str, ...]
    cpu_variant: str
    kernels: str
    kernels_version: str

    def human(self) -> str:
        return (
            f"edgeinfer {self.edgeinfer}\npython {self.python}\nllama-cpp-python "
            f"{self.llama_cpp_python}\n"
            f"llama.cpp {self.llama_cpp}, commit {self.llama_cpp_commit}, {self.cpu_variant or 'one'} "
            f"variant, kernels {f'{self.kernels} {self.kernels_version}'.strip() or 'its own'}\n"
            f"flags {' '.join(self.llama_cpp_flags)}"
        )


class LicensesResult(Result, frozen=True, kw_only=True):
    """The components of the one-file program (`share/licences.json`); `folder` has their licences."""

    folder: str
    components: tuple[dict[str, Any], ...]

    def human(self) -> str:
        rows = [(f"{c['name']} {c['version']}", c["licence"]) for c in self.components]
        source = "CRIU is a separate program under GPL-2.0; criu/SOURCE-OFFER.txt offers its source"
        return f"{table(rows)}\n\ntheir texts: {self.folder}\n{source}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--licenses", "list the components of this program by licence instead")


def run(options: argparse.Namespace, _host: EngineHost) -> Result:
    """Show versions. Raises ShippingError for `--licenses` if this is not the one-file program."""
    if options.licenses:
        return _licenses()
    # slow import: llama_cpp takes 160 to 290 ms
    from edgeinfer.runtime.llama.libllama import build_info

    build = build_info()
    return VersionResult(
        edgeinfer=__version__,
        python=platform.python_version(),
        llama_cpp_python=build.binding_version,
        llama_cpp=build.llama_version,
        llama_cpp_commit=build.ggml_commit,  # ggml is a part of llama.cpp's repository
        llama_cpp_flags=build.flags,
        cpu_variant=build.cpu_variant,
        kernels=build.kernels,
        kernels_version=build.kernels_version,
    )


def _licenses() -> LicensesResult:
    app = shipped.app_dir()
    if app is None:
        hint = "for the licence of a Python package: `pip show --verbose NAME`"
        problem = "--licenses needs the one-file program; this edgeinfer is a Python package"
        raise ShippingError(problem, hint=hint)
    listed = (app / "share/licences.json").read_bytes()
    components = msgspec.json.decode(listed, type=tuple[dict[str, Any], ...])
    return LicensesResult(folder=str(app / "share/licences"), components=components)
