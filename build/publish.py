"""`make release`: write all files of a release to dist/release (called by scripts/release.sh).

usage: publish.py [--key FILE] [--days N] [--renew DIR]

    edgeinfer-ARCH              the shipped file of this machine, and edgeinfer-aarch64 if it exists
    edgeinfer_VERSION_ARCH.deb  and .rpm: the shipped file, man page, completions, systemd units
    edgeinfer-VERSION-….whl     the package with llama.cpp and our own libraries (release_wheel.py)
    libggml-cuda-ARCH.so        the CUDA backend for `edgeinfer backend install`, if it was built
    edgeinfer.cdx.json          the components of the shipped file (notices.py)
    provenance.intoto.json      an in-toto statement, SLSA provenance 1.0
    release.json                the manifest for `edgeinfer update` (edgeinfer.shipping.update)
    SHA256SUMS                  digests of all these files
    *.sig                       with --key: the signatures of release.json and SHA256SUMS

`--renew` builds nothing: it gives the release.json in DIR new times, and corrects SHA256SUMS. `--key`
needs an Ed25519 key as `openssl genpkey -algorithm ed25519` writes it. Equal inputs give equal files,
except for release.json, which contains the time, SHA256SUMS and signatures.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "build")]

import msgspec  # noqa: E402  the two folders above come first
import release_wheel  # noqa: E402

from edgeinfer import __version__  # noqa: E402
from edgeinfer.platform.ed25519 import parse_key  # noqa: E402
from edgeinfer.runtime.llama.backend_loading import this_build  # noqa: E402
from edgeinfer.runtime.llama.backends import LibraryFacts, facts_path  # noqa: E402
from edgeinfer.shipping import payload  # noqa: E402
from edgeinfer.shipping.update import SIGNATURE, Release, ReleasedBackend, ReleasedFile, channel  # noqa: E402

DIST = ROOT / "dist"
OUT = DIST / "release"
#: Debian's names of the architectures, by `uname -m`.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
#: Path at which the packages install the shipped file, and which their systemd units start.
PROGRAM = "/usr/bin/edgeinfer"
COMPLETIONS = {
    "edgeinfer.bash": "/usr/share/bash-completion/completions/edgeinfer",
    "_edgeinfer": "/usr/share/zsh/site-functions/_edgeinfer",
    "edgeinfer.fish": "/usr/share/fish/vendor_completions.d/edgeinfer.fish",
}
UNITS = "/usr/lib/systemd/user"
#: Folders that a system may lack. rpm removes only folders that are named in a package.
FOLDERS = (
    "/usr/share/doc/edgeinfer",
    UNITS,
    *(str(folder) for name in COMPLETIONS.values() for folder in Path(name).parents[:2]),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--key", type=Path, help="sign with this Ed25519 key")
    parser.add_argument(
        "--days", type=int, default=180, help="days for which `edgeinfer update` accepts release.json"
    )
    parser.add_argument(
        "--renew", type=Path, metavar="DIR", help="renew the release.json of this release"
    )
    options = parser.parse_args()
    if options.renew:
        renew(options.renew, options.days)
    else:
        build(options.days)
    if options.key:
        folder = options.renew or OUT
        sign(options.key, folder / "release.json", folder / "SHA256SUMS")


def build(days: int) -> None:
    os.umask(0o022)  # sets the modes of folders in the wheel
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    programs = find_programs()
    for arch, program in programs.items():
        shutil.copy(program, OUT / f"edgeinfer-{arch}")
        package(OUT / f"edgeinfer-{arch}", arch)
    backends = release_backends()
    release_wheel.build(OUT)
    for name in ("edgeinfer.cdx.json", "INSTALL.md", "edgeinfer-oci.tar"):
        if (DIST / name).exists():
            shutil.copy(DIST / name, OUT)
    (OUT / "provenance.intoto.json").write_text(json.dumps(provenance(), indent=1) + "\n")
    (OUT / "release.json").write_bytes(msgspec.json.encode(manifest(programs, days, backends)))
    sums = [f"{digest}  {name}\n" for name, digest in digests().items()]
    (OUT / "SHA256SUMS").write_text("".join(sums))


def renew(folder: Path, days: int) -> None:
    """Let a published manifest expire `days` from now; its other content stays."""
    manifest_file, sums = folder / "release.json", folder / "SHA256SUMS"
    raw, now = manifest_file.read_bytes(), int(time.time())
    before = msgspec.json.decode(raw, type=Release)
    renewed = msgspec.json.encode(
        msgspec.structs.replace(before, issued_s=now, expires_s=now + days * 86400)
    )
    old, new = (hashlib.sha256(content).hexdigest() for content in (raw, renewed))
    text = sums.read_text()
    if f"{old}  release.json\n" not in text:
        raise SystemExit(
            f"error: {sums} does not list this release.json\n\nhint: download both files again"
        )
    manifest_file.write_bytes(renewed)
    sums.write_text(text.replace(old, new))


def find_programs() -> dict[str, Path]:
    """Return the shipped files by machine: the one built here, and others next to it."""
    programs = {arch: DIST / f"edgeinfer-{arch}" for arch in ARCHITECTURES}
    programs[platform.machine()] = DIST / "edgeinfer"
    programs = {arch: path for arch, path in programs.items() if path.exists()}
    for path in programs.values():
        version = payload.open_shipped(path).app.rpartition("-")[0]
        if version != __version__:
            raise SystemExit(f"error: {path} has version {version}\n\nhint: remove or rebuild it")
    return programs


def release_backends() -> tuple[ReleasedBackend, ...]:
    """Copy dist/backends into the release. Raises SystemExit for libraries of another llama.cpp."""
    released = []
    for library in sorted((DIST / "backends").glob("libggml-*.so")):
        facts = msgspec.json.decode(facts_path(library).read_bytes(), type=LibraryFacts)
        if not facts.build.fits(this_build()):
            raise SystemExit(f"error: {library} is for {facts.build}\n\nhint: run `make cuda` again")
        if hashlib.sha256(library.read_bytes()).hexdigest() != facts.sha256:
            raise SystemExit(
                f"error: {library} differs from its JSON file's SHA-256\n\nhint: run `make cuda`"
            )
        name = f"{library.stem}-{facts.build.machine.rpartition('-')[2]}.so"
        shutil.copy(library, OUT / name)
        released.append(
            ReleasedBackend(name=name, size_bytes=facts.size_bytes, sha256=facts.sha256, facts=facts)
        )
    return tuple(released)


def digests() -> dict[str, str]:
    names = sorted(path.name for path in OUT.iterdir())
    return {name: hashlib.sha256((OUT / name).read_bytes()).hexdigest() for name in names}


def manifest(
    programs: dict[str, Path], days: int, backends: tuple[ReleasedBackend, ...] = ()
) -> Release:
    now = int(time.time())
    files = {
        arch: ReleasedFile(
            name=f"edgeinfer-{arch}",
            size_bytes=path.stat().st_size,
            sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for arch, path in programs.items()
    }
    return Release(
        version=__version__, issued_s=now, expires_s=now + days * 86400, files=files, backends=backends
    )


def sign(key_file: Path, *files: Path) -> None:
    """Write FILE.sig for each file. Raises SystemExit for a key that is not in release.toml."""
    key = parse_key(key_file.read_text())
    if key is None:
        raise SystemExit(
            f"error: {key_file} is not an Ed25519 key\n\nhint: openssl genpkey -algorithm ed25519"
        )
    if key.public.hex() not in channel().keys:
        raise SystemExit(
            f"error: the shipped programs would not accept signatures by {key_file}\n\n"
            f"hint: add its public key to edgeinfer/data/release.toml: {key.public.hex()}"
        )
    for file in files:
        file.with_name(file.name + SIGNATURE).write_bytes(key.sign(file.read_bytes()))


def package(program: Path, arch: str) -> None:
    """Write a .deb and an .rpm package of a shipped file to dist/release."""
    contents = [
        (program, PROGRAM, 0o755),
        (ROOT / "LICENSE", "/usr/share/doc/edgeinfer/copyright", 0o644),
    ]
    contents += [(DIST / "completions" / name, to, 0o644) for name, to in COMPLETIONS.items()]
    with tempfile.TemporaryDirectory() as scratch:
        manual = Path(scratch) / "edgeinfer.1.gz"
        manual.write_bytes(gzip.compress((DIST / "edgeinfer.1").read_bytes(), mtime=0))
        contents.append((manual, f"/usr/share/man/man1/{manual.name}", 0o644))
        for unit in sorted((ROOT / "docs/systemd").iterdir()):
            text = unit.read_text().replace("%h/.local/bin/edgeinfer", PROGRAM)
            copy = Path(scratch) / unit.name
            copy.write_text(text.replace("~/.config/systemd/user/", ""))
            contents.append((copy, f"{UNITS}/{unit.name}", 0o644))
        config = Path(scratch) / "nfpm.json"  # JSON is YAML
        config.write_text(json.dumps(_nfpm(arch, contents)))
        for kind in ("deb", "rpm"):
            nfpm = Path(sys.executable).with_name("nfpm")
            command = [nfpm, "package", "--config", config, "--packager", kind, "--target", OUT]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _nfpm(arch: str, contents: list[tuple[Path, str, int]]) -> dict[str, Any]:
    project = "edgeinfer contributors"
    return {
        "name": "edgeinfer",
        "arch": ARCHITECTURES[arch],
        "platform": "linux",
        "version": __version__,
        "mtime": _time(),
        "section": "utils",
        "maintainer": project,
        "vendor": project,
        "description": "Local language models that feel already loaded\n"
        "Chat, endpoint and scripts over llama.cpp, resumed from a snapshot.",
        "license": "MIT",
        "overrides": {"deb": {"depends": ["libc6 (>= 2.31)"]}, "rpm": {"depends": ["glibc >= 2.31"]}},
        "rpm": {"buildhost": "edgeinfer"},
        "contents": [
            *({"dst": folder, "type": "dir"} for folder in FOLDERS),
            *(
                {"src": str(src), "dst": dst, "file_info": {"mode": mode, "mtime": _time()}}
                for src, dst, mode in contents
            ),
        ],
    }


def _time() -> str:
    epoch = int(os.environ["SOURCE_DATE_EPOCH"])
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch))


def provenance() -> dict[str, Any]:
    """Return the provenance statement: the release's files, their inputs, and the builder."""
    commit = _run("git", "rev-parse", "HEAD")
    components = json.loads((DIST / "edgeinfer.cdx.json").read_text())["components"]
    inputs = [{"uri": part["purl"]} for part in components]
    lock = hashlib.sha256((ROOT / "requirements/dev.txt").read_bytes()).hexdigest()
    builder = os.environ.get("GITHUB_WORKFLOW_REF", "make release")
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": d}} for name, d in digests().items()],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:edgeinfer:make-release:1",
                "externalParameters": {"version": __version__, "command": "make release"},
                "resolvedDependencies": [
                    {"uri": "git+edgeinfer", "digest": {"gitCommit": commit}},
                    {"uri": "requirements/dev.txt", "digest": {"sha256": lock}},
                    *inputs,
                ],
            },
            "runDetails": {"builder": {"id": builder}},
        },
    }


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


if __name__ == "__main__":
    main()
