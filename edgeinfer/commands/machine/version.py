"""`edgeinfer version`: of this program and of what it is built on."""

from __future__ import annotations

import argparse
import platform
from typing import ClassVar

from edgeinfer import __version__
from edgeinfer.host import Host
from edgeinfer.result import Result


class VersionResult(Result, frozen=True, kw_only=True):
    """Versions as text. `llama_cpp_flags` are the instruction sets that llama.cpp reports.

    `attention` is the level of our own in use ("v3", "v4"), "" for llama.cpp's.
    """

    kind: ClassVar[str] = "version"

    edgeinfer: str
    python: str
    llama_cpp_python: str
    llama_cpp: str
    llama_cpp_commit: str
    llama_cpp_flags: tuple[str, ...]
    cpu_variant: str
    attention: str

    def human(self) -> str:
        return (
            f"edgeinfer {self.edgeinfer}\npython {self.python}\nllama-cpp-python "
            f"{self.llama_cpp_python}\n"
            f"llama.cpp {self.llama_cpp}, commit {self.llama_cpp_commit}, {self.cpu_variant or 'one'} "
            f"variant, attention {self.attention or 'its own'}\n"
            f"flags {' '.join(self.llama_cpp_flags)}"
        )


def version(_options: argparse.Namespace, _host: Host) -> VersionResult:
    """Ask the loaded library itself."""
    from edgeinfer.runtime.libllama import build_info  # 160–290 ms: llama_cpp

    build = build_info()
    return VersionResult(
        edgeinfer=__version__,
        python=platform.python_version(),
        llama_cpp_python=build.binding_version,
        llama_cpp=build.llama_version,
        llama_cpp_commit=build.ggml_commit,  # one repository: ggml's build stamp is llama.cpp's
        llama_cpp_flags=build.flags,
        cpu_variant=build.cpu_variant,
        attention=build.attention,
    )
