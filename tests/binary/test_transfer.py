"""A snapshot goes to another machine: another root, home and user."""

import json
import os
import shutil

from .conftest import MODEL, Machine
from .test_bare_machine import ASK

HOME, UID = "/home/other", 1001


def test_it_computes_the_same_on_another_machine(warm, modern, binary, tmp_path):
    warm.run("warm", MODEL)  # another test may have unpacked the application again since
    signer = warm.json("snapshots", "export", MODEL, "/tmp/exported", "--quiet")["signer"]
    there = Machine(tmp_path / "root", binary)
    home = there.root / HOME[1:]
    shutil.copytree(there.home, home)
    for machine in (there, modern):
        shutil.copytree(warm.root / "tmp/exported", machine.root / "tmp/exported")
    if os.geteuid() == 0:
        for path in (home, *home.rglob("*")):
            os.chown(path, UID, UID)

    def run(*args: str) -> dict:
        done = there.run(*args, "--json", options=("--uid", str(UID)), HOME=HOME)
        return json.loads(done.stdout.splitlines()[-1])["result"]

    run("snapshots", "trust", signer)
    modern.json("snapshots", "trust", signer)
    words = ("snapshots", "import", "/tmp/exported", "--quiet")
    assert run(*words)["snapshot"]["model"] == MODEL
    here = run(*ASK)
    assert here["start"]["how"] == "resumed"
    assert here["text"] == warm.json(*ASK)["text"]

    imported = modern.json(*words)  # another C library: built here of the same files
    assert imported["snapshot"]["model"] == MODEL
