"""A launch of the shipped file in containers, under a seccomp filter and without user namespaces, from
exec to the first token.

    bench_containers.py [--binary dist/edgeinfer] [--models small,7b] [--runs 6] [--person NAME] [--out bench-out]

Every place has a home of its own. A first launch has to unpack the program; a later one finds it, and a
snapshot if one can be built there. The model's file is in the page cache. The time starts just before
the program's exec, inside the container, and ends with the first byte of the answer; places alternate
launch by launch. Medians and the spread go to bench-out/containers.md.

Containers are rootless podman's, those of the calling user, under root those of `--person`, who needs
a range in /etc/subuid. The image is the Debian tree that tools/setup.sh unpacks for tests. They
have no network, and runc, because both work on any machine; every other option is podman's default.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from common import CACHE, ROOT, add_out, link_model, spread, write_figure  # noqa: E402  the folders this script is in

HOME = "/home/person"
#: Prints the time and becomes the program.
STAMP = ["bash", "-c", 'echo "$EPOCHREALTIME" >&2; exec "$@"', "stamp"]
#: Commands that run a program on this machine, by place.
AROUND = {
    "no container": [],
    "no container, user namespaces forbidden": [
        *("unshare", "--map-current-user", "--keep-caps", "bash", "-c"),
        'echo 0 >/proc/sys/user/max_user_namespaces; exec setpriv --ambient-caps=-all --inh-caps=-all "$@"',
        "forbid",
    ],
    "no container, a seccomp filter (WSL2's)": [
        "/usr/bin/python3",
        str(ROOT / "tests/made/filtered.py"),
    ],
}
RESTRICTED = "--read-only --tmpfs=/tmp --cap-drop=all --security-opt=no-new-privileges --user=1000:1000"
#: Options of podman, by place.
CONTAINERS = {
    "podman, as it comes": "",
    "podman, read-only root": "--read-only --tmpfs=/tmp",
    "podman, Kubernetes' restricted profile": RESTRICTED,
    "podman, the same without filter and masked /proc": f"{RESTRICTED} --security-opt=seccomp=unconfined"
    " --security-opt=unmask=ALL",
}


class Person:
    """The ordinary user whose programs and containers are timed; `work` is this user's folder."""

    def __init__(self, name: str, work: Path) -> None:
        entry = pwd.getpwnam(name)
        self.work = work
        self.ids: dict[str, Any] = {}
        if os.geteuid() == 0:
            self.ids = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
            os.chown(work, entry.pw_uid, entry.pw_gid)
        self.environment = {
            "HOME": str(work),
            "XDG_RUNTIME_DIR": str(work / "runtime"),
            "LANG": "C.UTF-8",
            "PATH": os.environ["PATH"],
        }
        self.podman = ["podman", "--storage-driver=overlay", "--runtime=runc"]
        self.podman += [f"--root={work}/store", f"--runroot={work}/run"]
        self.run("mkdir", "-m", "700", str(work / "runtime"))

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command. Raises SystemExit if it fails, unless `check` is false."""
        done = subprocess.run(
            command,
            env=self.environment,
            cwd=self.work,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
            **self.ids,
        )
        if check and done.returncode:
            raise SystemExit(f"error: {' '.join(command)}: {done.stdout} {done.stderr}")
        return done

    def open(self, command: list[str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env=self.environment,
            cwd=self.work,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            **self.ids,
        )

    def import_image(self) -> None:
        archive = self.work / "base.tar"
        subprocess.run(["tar", "-C", str(CACHE / "systemd-257"), "-cf", str(archive), "."], check=True)
        self.run(*self.podman, "import", "--quiet", str(archive), "localhost/base")
        archive.unlink()


class Place:
    """Where edgeinfer is launched: a home, and the command that runs a program there."""

    def __init__(self, name: str, person: Person, binary: Path) -> None:
        self.name = name
        self.launches = ""
        self._person = person
        self._home = person.work / f"home-{len(list(person.work.glob('home-*')))}"
        person.run("mkdir", str(self._home))
        models = person.work / "models"
        if name in AROUND:
            inside = ["env", f"HOME={self._home}", "PATH=/usr/bin:/bin"]
            self._around = [*AROUND[name], *inside]
            self._program, self.models = str(binary), models
        else:
            options = CONTAINERS[name].split()
            mounts = [f"--volume={self._home}:{HOME}", f"--volume={models}:/models:ro"]
            mounts.append(f"--volume={binary}:/usr/local/bin/edgeinfer:ro")
            self._around = [*person.podman, "run", "--rm", "--network=none", *options, *mounts]
            self._around += [f"--env=HOME={HOME}", "localhost/base"]
            self._program, self.models = "/usr/local/bin/edgeinfer", Path("/models")
            if "--user=1000:1000" in options:
                person.run(*person.podman, "unshare", "chown", "1000:1000", str(self._home))
        switch = "mkdir -p ~/.config/edgeinfer; printf '[snapshots]\\nauto-warm = false\\n' >"
        person.run(*self._around, "bash", "-c", f"{switch} ~/.config/edgeinfer/config.toml")

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self._person.run(*self._around, self._program, *words, check=check)

    def forget_program(self) -> None:
        self._person.run(*self._around, "bash", "-c", "rm -rf ~/.local/share/edgeinfer/app")

    def first_token_ms(self, model: str) -> float:
        """Launch `run`; return the time from its exec to its answer's first byte."""
        ask = ("run", model, "--raw", "Hello", "--temperature", "0", "--max-tokens", "1")
        with tempfile.TemporaryFile() as errors:
            process = self._person.open([*self._around, *STAMP, self._program, *ask], errors)
            assert process.stdout is not None
            first = process.stdout.read(1)
            answered = time.time()
            process.communicate()
            errors.seek(0)
            text = errors.read().decode()
        if process.returncode or not first:
            raise SystemExit(f"error: {self.name}: {' '.join(ask)}: {text}")
        return (answered - float(text.split()[0])) * 1000

    def describe_launches(self, model: str) -> str:
        """Say how a launch starts here, and the finding of `doctor` about snapshots."""
        ask = ("run", model, "Hi", "--max-tokens", "1", "--json")
        how = json.loads(self.run(*ask).stdout)["result"]["start"]["how"]
        checks = json.loads(self.run("doctor", "--json", check=False).stdout)["result"]["checks"]
        found = next(check["found"] for check in checks if check["name"] == "snapshots")
        tier = found.partition(":")[0]
        return (
            f"{how}: {found.removeprefix('launches are cold: ')}" if how == "cold" else f"{how}, {tier}"
        )


@contextlib.contextmanager
def places(options: argparse.Namespace) -> Iterator[list[Place]]:
    with tempfile.TemporaryDirectory(
        prefix="bench-containers-", dir=options.work, ignore_cleanup_errors=True
    ) as folder:
        work = Path(folder)
        (work / "models").mkdir(mode=0o755)
        for model in options.models:
            link_model(model, work / "models")
        person = Person(options.person, work)
        binary = work / "edgeinfer"
        shutil.copy(options.binary, binary)
        binary.chmod(0o755)
        person.import_image()
        try:
            yield [Place(name, person, binary) for name in [*AROUND, *CONTAINERS]]
        finally:
            # homes and layers belong to users of the person's range; migrate ends podman's own process
            remove = f"umount -l {work}/store/overlay; rm -rf {work}/home-* {work}/store"
            person.run(*person.podman, "unshare", "bash", "-c", remove, check=False)
            person.run(*person.podman, "system", "migrate", check=False)


def measure(model: str, all_places: list[Place], runs: int) -> dict[str, dict[str, list[float]]]:
    """Launch the model in each place: first launches in turn, then later ones. Times in ms."""
    for place in all_places:
        place.run("pull", str(place.models / f"{model}.gguf"), "--name", model, "--in-place", "--quiet")
    found: dict[str, dict[str, list[float]]] = {p.name: {"first": [], "later": []} for p in all_places}
    for _ in range(runs):
        for place in all_places:
            place.forget_program()
            found[place.name]["first"].append(place.first_token_ms(model))
    for place in all_places:
        place.run("warm", model, "--quiet", check=False)
        place.launches = place.describe_launches(model)
    for _ in range(runs):
        for place in all_places:
            found[place.name]["later"].append(place.first_token_ms(model))
    return found


def table(results: dict[str, dict[str, Any]], all_places: list[Place]) -> str:
    """Markdown: a row a place; medians and the spread (least to greatest) in ms."""
    columns = [(model, which) for model in results for which in ("first", "later")]
    lines = ["| exec to first token | launches | "]
    lines[0] += " | ".join(f"{model}, {which}" for model, which in columns) + " |"
    lines.append("|---" * (len(columns) + 2) + "|")
    for place in all_places:
        cells = [spread(results[model][place.name][which], "ms") for model, which in columns]
        lines.append(f"| {place.name} | {place.launches} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--binary", type=Path, default=ROOT / "dist/edgeinfer")
    parser.add_argument("--models", type=lambda text: text.split(","), default=["small", "7b"])
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--person", default=pwd.getpwuid(os.geteuid()).pw_name, metavar="NAME")
    parser.add_argument("--work", metavar="FOLDER", help="a folder with room for models, no tmpfs")
    add_out(parser)
    options = parser.parse_args()
    if pwd.getpwnam(options.person).pw_uid == 0:
        parser.error("root's containers are not rootless: name an ordinary user with --person")
    with places(options) as all_places:
        results = {model: measure(model, all_places, options.runs) for model in options.models}
        text = table(results, all_places)
    write_figure(options.out, "containers", text)
    print(text)


if __name__ == "__main__":
    main()
