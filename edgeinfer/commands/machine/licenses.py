"""`edgeinfer licenses`: list what this program is made of, its licences and its sources."""

from __future__ import annotations

import argparse
import importlib.metadata
from pathlib import Path
from typing import ClassVar

import msgspec

from edgeinfer import __version__
from edgeinfer.errors import UsageError
from edgeinfer.host import Host
from edgeinfer.result import Result
from edgeinfer.shipping import shipped


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """A part by others. `texts` are its licences' paths; `kind` is pypi, deb or generic."""

    name: str
    version: str
    kind: str
    licence: str
    texts: tuple[str, ...] = ()
    source: str = ""
    sha256: str = ""


class LicensesResult(Result, frozen=True, kw_only=True):
    """Every component, the `offer` of CRIU's source, the `text` of licences asked for."""

    kind: ClassVar[str] = "licenses"

    edgeinfer: str
    components: tuple[Component, ...]
    offer: str = ""
    text: str = ""

    def human(self) -> str:
        if self.text:
            return self.text
        width = max((len(c.name) + len(c.version) for c in self.components), default=0) + 1
        lines = [f"edgeinfer {self.edgeinfer}: MIT", ""]
        lines += [f"{c.name + ' ' + c.version:{width}}  {c.licence}" for c in self.components]
        lines += ["", "the whole text of one: edgeinfer licenses NAME"]
        if self.offer:
            lines += [
                f"CRIU is a separate program under GPL-2.0; the offer of its source: {self.offer}"
            ]
        return "\n".join(lines)


def licenses(options: argparse.Namespace, _host: Host) -> LicensesResult:
    """Raises UsageError when a component is named that is not inside."""
    app = shipped.app_dir()
    components = _shipped(app) if app else _installed()
    offer = app / "share/licences/criu/SOURCE-OFFER.txt" if app else None
    return LicensesResult(
        edgeinfer=__version__,
        components=components,
        offer=str(offer) if offer and offer.is_file() else "",
        text=_text(options.name, components) if options.name else "",
    )


def _shipped(app: Path) -> tuple[Component, ...]:
    found = msgspec.json.decode((app / "share/licences.json").read_bytes(), type=tuple[Component, ...])
    return tuple(
        msgspec.structs.replace(c, texts=tuple(str(app / text) for text in c.texts)) for c in found
    )


def _installed() -> tuple[Component, ...]:
    """The distributions edgeinfer requires in this environment, and what those require."""
    found: dict[str, Component] = {}
    todo = ["edgeinfer"]
    while todo:
        name = todo.pop()
        key = name.lower().replace("_", "-")
        try:
            dist = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a requirement of another platform, or of an extra that is not installed
        if key in found:
            continue
        found[key] = _component(dist)
        todo += [_required(line) for line in dist.requires or [] if "extra ==" not in line]
    found.pop("edgeinfer", None)
    return tuple(found[key] for key in sorted(found))


def _required(line: str) -> str:
    """`httpx2[http2]>=2; python_version < "3.13"` → `httpx2`."""
    end = next((i for i, c in enumerate(line) if not (c.isalnum() or c in "._-")), len(line))
    return line[:end]


def _component(dist: importlib.metadata.Distribution) -> Component:
    meta = dist.metadata
    fields = [line for name in ("License-Expression", "License") for line in meta.get_all(name) or []]
    licence = next((text.split("\n")[0][:60] for text in fields if text), "")
    classifiers = [
        c.rpartition("::")[2].strip()
        for c in meta.get_all("Classifier") or []
        if c.startswith("License")
    ]
    texts = [
        str(dist.locate_file(f))
        for f in dist.files or []
        if "licen" in f.name.lower() and ".dist-info" in str(f)
    ]
    return Component(
        name=meta["Name"],
        version=dist.version,
        kind="pypi",
        licence=licence or ", ".join(classifiers),
        texts=tuple(sorted(texts)),
    )


def _text(name: str, components: tuple[Component, ...]) -> str:
    wanted = [c for c in components if c.name.lower() == name.lower()]
    if not wanted:
        raise UsageError(f"nothing called {name} is inside", hint="`edgeinfer licenses` lists what is")
    parts = [f"{c.name} {c.version}: {c.licence}\n{c.source}\n" for c in wanted]
    seen = dict.fromkeys(text for c in wanted for text in c.texts)
    return "\n".join([*parts, *(Path(text).read_text("utf-8", "replace") for text in seen)])
