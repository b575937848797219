"""List the components of the shipped file, with licences and their texts, also as CycloneDX.

The list is computed: the Python distributions whose files PyInstaller collected, the Debian packages
whose libraries it copied (CPython's too), CRIU's packages, the packages of the headers in the Vulkan
backend, and the components that come in no package: llama.cpp, the chat page's library and
PyInstaller's bootloader.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from edgeinfer import __version__

HERE = Path(__file__).parent
#: SPDX expressions for the texts that distributions without an SPDX expression have in its place.
SPDX = {
    "mit": "MIT",
    "mit license": "MIT",
    "apache": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache-2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "isc": "ISC",
    "3-clause bsd license": "BSD-3-Clause",
    "mpl-2.0": "MPL-2.0",
    "isc license (iscl)": "ISC",
    "psf": "PSF-2.0",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "bsd-3-clause": "BSD-3-Clause",
    "apache license 2.0": "Apache-2.0",
    "python software foundation license": "PSF-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "bsd-3-clause, apache-2.0, dependency licenses": "BSD-3-Clause AND Apache-2.0",
}


#: Licences of the Debian packages whose copyright file is not machine-readable.
KNOWN = {
    "criu": "GPL-2.0-only",
    "libpython3.11": "PSF-2.0",
    "libpython3.11-minimal": "PSF-2.0",
    "libpython3.11-stdlib": "PSF-2.0",
    "libgcc-s1": "GPL-3.0-or-later WITH GCC-exception-3.1",
    "libgomp1": "GPL-3.0-or-later WITH GCC-exception-3.1",
    "libstdc++6": "GPL-3.0-or-later WITH GCC-exception-3.1",
    "libnl-3-200": "LGPL-2.1-only",
    "libtasn1-6": "LGPL-2.1-or-later",
}


@dataclass(frozen=True, order=True)
class Component:
    """A third-party component. `kind` is a package URL type, `texts` are paths in the application."""

    name: str
    version: str
    kind: str
    licence: str
    texts: tuple[str, ...] = ()
    source: str = ""
    sha256: str = field(default="", compare=False)

    @property
    def purl(self) -> str:
        names = {
            "deb": f"deb/debian/{self.name}@{self.version}",
            "pypi": f"pypi/{self.name.lower()}@{self.version}",
            "npm": f"npm/{self.name}@{self.version}",
        }
        return "pkg:" + names.get(self.kind, f"generic/{self.name}@{self.version}").replace("+", "%2B")


def write(tree: Path, work: Path, backends: Path, bom: Path) -> list[Component]:
    """Write licences and their list to `tree/share`, and the CycloneDX file `bom`; return the list."""
    texts = tree / "share/licences"
    collected = _collected_files(work)
    components = [
        *_distributions(collected, texts),
        *_debian(collected, texts),
        *_criu(tree, texts),
        *_headers(backends / "share", texts),
        _llama_cpp(texts),
        _page_library(texts),
        _bootloader(texts),
    ]
    components.sort()
    document = [asdict(c) for c in components]
    (tree / "share/licences.json").write_text(json.dumps(document, indent=1) + "\n")
    shutil.copy(HERE.parent / "LICENSE", tree / "share/LICENSE")
    bom.write_text(json.dumps(_cyclonedx(components), indent=1) + "\n")
    shutil.copy(bom, tree / "share/edgeinfer.cdx.json")
    return components


def _collected_files(work: Path) -> set[Path]:
    """Return the files that PyInstaller packed into the application and the first start's archive."""
    paths: set[Path] = set()
    for name in ("PYZ-00.toc", "PYZ-01.toc", "COLLECT-00.toc", "PKG-01.toc"):
        paths |= {Path(path) for _, path, _ in _entries(ast.literal_eval((work / name).read_text()))}
    return paths


def _entries(value: Any) -> list[tuple[str, str, str]]:
    """List every `(name, path, type)` in PyInstaller's nested lists."""
    if isinstance(value, tuple) and len(value) == 3 and all(isinstance(v, str) for v in value):
        return [value]
    if isinstance(value, (list, tuple)):
        return [entry for part in value for entry in _entries(part)]
    return []


def _distributions(collected: set[Path], texts: Path) -> list[Component]:
    packed = {str(p.resolve()) for p in collected if "site-packages" in p.parts}
    components = []
    for dist in importlib.metadata.distributions():
        name = dist.metadata["Name"]
        files = [Path(str(dist.locate_file(f))) for f in dist.files or []]
        code = [f for f in files if not any(part.endswith(".dist-info") for part in f.parts)]
        if name in ("edgeinfer", "pyinstaller") or not any(str(f.resolve()) in packed for f in code):
            continue
        copied = _copy(texts / name, [f for f in files if _is_legal(f) and f.is_file()])
        source = f"pkg:pypi/{name}@{dist.version}"
        components.append(Component(name, dist.version, "pypi", _licence(dist), copied, source))
    return components


def _is_legal(file: Path) -> bool:
    """Return whether a distribution's file is a licence or notice, by its name or folder."""
    inside = ".dist-info/licenses/" in file.as_posix()  # PDFium's licences have the libraries' names
    named = re.search(r"(?i)licen[cs]e|copying|notice|authors", file.name)
    return bool(inside or named) and file.suffix not in (".py", ".pyc", ".so")


def _licence(dist: importlib.metadata.Distribution) -> str:
    meta = dist.metadata
    for value in (meta.get("License-Expression"), meta.get("License")):
        if value and len(value) < 60 and value != "UNKNOWN":
            return SPDX.get(value.lower().strip(), value)
    classifiers = [c for c in meta.get_all("Classifier") or [] if c.startswith("License")]
    names = [c.rpartition("::")[2].strip() for c in classifiers]
    return " OR ".join(SPDX.get(name.lower(), name) for name in names) or "see its text"


def _debian(collected: set[Path], texts: Path) -> list[Component]:
    """Return the Debian packages of the collected libraries and modules."""
    files = sorted(str(p) for p in collected if str(p).startswith(("/lib/", "/usr/lib/")))
    packages = _owners(files)
    components = []
    for package in sorted(packages):
        fields = "${Version}\\t${source:Package}\\t${source:Version}"
        version, source, source_version = _run("dpkg-query", "-W", "-f", fields, package).split("\t")
        name = package.partition(":")[0]
        text = Path("/usr/share/doc") / name / "copyright"
        copied = _copy(texts / f"debian-{name}", [text] if text.is_file() else [])
        row = (name, version, source, source_version, "")
        components.append(_debian_component(row, text, copied))
    return components


def _debian_component(row: Sequence[str], text: Path, inside: tuple[str, ...]) -> Component:
    """Make a component from a row of packages.tsv (scripts/debian.sh); `text` is its copyright file."""
    name, version, source, source_version, digest = row
    licence = KNOWN.get(name) or _debian_licence(text)
    url = f"pkg:deb/debian/{source}@{source_version}?arch=source"
    return Component(name, version, "deb", licence, inside, url, digest)


def _owners(files: list[str]) -> set[str]:
    """Return the Debian packages of files. dpkg may know a path in /usr/lib as one in /lib."""
    paths = {*files, *map(os.path.realpath, files)}
    spellings = sorted({s for path in paths for s in (path, path.removeprefix("/usr"), f"/usr{path}")})
    command = ["dpkg-query", "-S", *spellings]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    named = (line for line in lines if not line.startswith("diversion "))
    return {line.partition(": ")[0].split(",")[0] for line in named}


def _debian_licence(text: Path) -> str:
    """Return the three commonest licence names in a machine-readable copyright file, as one text."""
    if not text.is_file():
        return "see its text"
    names = re.findall(r"^License: *([^\n]+)", text.read_text("utf-8", "replace"), re.MULTILINE)
    ranked = sorted(set(names), key=lambda n: (-names.count(n), n))
    shown = ranked[:3] + ["…"] * (len(ranked) > 3)
    return ", ".join(shown) or "see its text"


def _criu(tree: Path, texts: Path) -> list[Component]:
    table = tree / "criu/share/packages.tsv"
    if not table.is_file():
        return []
    shutil.move(tree / "criu/share/doc", texts / "criu")
    offer = texts / "criu/SOURCE-OFFER.txt"
    offer.write_text((HERE / "licences/criu-source-offer.txt").read_text() + table.read_text())
    return _components_of(table, texts / "criu", ("share/licences/criu/SOURCE-OFFER.txt",))


def _headers(share: Path, texts: Path) -> list[Component]:
    """Return the packages of headers that are compiled into the Vulkan backend."""
    if not (share / "packages.tsv").is_file():
        return []
    shutil.copytree(share / "doc", texts / "vulkan")
    return _components_of(share / "packages.tsv", texts / "vulkan")


def _components_of(table: Path, texts: Path, more: tuple[str, ...] = ()) -> list[Component]:
    """Return the components of a packages.tsv; their copyright files are in the folder `texts`."""
    components = []
    for line in table.read_text().splitlines():
        row = line.split("\t")
        inside = (f"share/licences/{texts.name}/{row[0]}/copyright", *more)
        components.append(_debian_component(row, texts / row[0] / "copyright", inside))
    return components


def _llama_cpp(texts: Path) -> Component:
    copied = _copy(texts / "llama.cpp", [HERE / "licences/llama.cpp.txt"])
    source = "https://github.com/ggml-org/llama.cpp"
    return Component("llama.cpp", _llama_commit(), "generic", "MIT", copied, source)


def _page_library(texts: Path) -> Component:
    """Return the component of the chat page's only vendored file; its notice has the version."""
    notice = HERE.parent / "edgeinfer/server/web/static/preact.LICENSE.txt"
    version = re.search(r"npm package htm ([\d.]+),", notice.read_text())[1]  # type: ignore[index]
    copied = _copy(texts / "htm", [notice])
    return Component("htm", version, "npm", "MIT AND Apache-2.0", copied, f"pkg:npm/htm@{version}")


def _llama_commit() -> str:
    code = "from edgeinfer.runtime.llama.libllama import build_info; print(build_info().ggml_commit)"
    return _run(str(Path(sys.executable).with_name("python")), "-c", code).strip() or "unknown"


def _bootloader(texts: Path) -> Component:
    dist = importlib.metadata.distribution("pyinstaller")
    legal = [Path(str(dist.locate_file(f))) for f in dist.files or [] if f.name == "COPYING.txt"]
    licence, source = (
        "GPL-2.0-or-later WITH Bootloader-exception",
        f"pkg:pypi/pyinstaller@{dist.version}",
    )
    copied = _copy(texts / "pyinstaller", legal)
    return Component("pyinstaller", dist.version, "pypi", licence, copied, source)


def _copy(folder: Path, files: list[Path]) -> tuple[str, ...]:
    names = []
    for file in sorted(files):
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / file.name
        if target.exists():  # for a second file of that name, prefix the name of its folder
            target = folder / f"{file.parent.name}-{file.name}"
        shutil.copyfile(file, target)
        names.append("share/licences/" + target.relative_to(folder.parent).as_posix())
    return tuple(names)


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _cyclonedx(components: list[Component]) -> dict[str, Any]:
    """Return the components as CycloneDX 1.5. Equal builds give equal lists.

    The serial number is a hash of the content; the time is SOURCE_DATE_EPOCH.
    """
    parts = []
    for c in components:
        part: dict[str, Any] = {
            "type": "library",
            "bom-ref": c.purl,
            "name": c.name,
            "version": c.version,
            "purl": c.purl,
        }
        spdx = c.kind != "deb" or c.name in KNOWN  # Debian's licence names are not SPDX's
        is_expression = spdx and _is_spdx(c.licence)
        part["licenses"] = [
            {"expression": c.licence} if is_expression else {"license": {"name": c.licence}}
        ]
        if c.source:
            part["externalReferences"] = [{"type": "distribution", "url": c.source}]
        if c.sha256:
            part["hashes"] = [{"alg": "SHA-256", "content": c.sha256}]
        parts.append(part)
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(os.environ["SOURCE_DATE_EPOCH"])))
    main = {"type": "application", "bom-ref": "edgeinfer", "name": "edgeinfer", "version": __version__}
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(parts, sort_keys=True))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {
            "timestamp": when,
            "component": {**main, "licenses": [{"license": {"id": "MIT"}}]},
        },
        "components": parts,
        "dependencies": [{"ref": "edgeinfer", "dependsOn": [p["bom-ref"] for p in parts]}],
    }


def _is_spdx(text: str) -> bool:
    identifiers = [w for w in re.split(r"[\s()]+", text) if w and w not in ("AND", "OR", "WITH")]
    return (
        bool(identifiers)
        and all(re.fullmatch(r"[A-Za-z0-9.+-]+", w) and not w[0].islower() for w in identifiers)
        and "," not in text
    )
