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
    other_machine = Machine(tmp_path / "root", binary)
    home = other_machine.root / HOME[1:]
    shutil.copytree(other_machine.home, home)
    for machine in (other_machine, modern):
        shutil.copytree(warm.root / "tmp/exported", machine.root / "tmp/exported")
    if os.geteuid() == 0:
        for path in (home, *home.rglob("*")):
            os.chown(path, UID, UID)

    def run(*args: str) -> dict:
        done = other_machine.run(*args, "--json", options=("--uid", str(UID)), HOME=HOME)
        return json.loads(done.stdout.splitlines()[-1])["result"]

    run("snapshots", "trust", signer)
    modern.json("snapshots", "trust", signer)
    importing = ("snapshots", "import", "/tmp/exported", "--quiet")
    assert run(*importing)["snapshot"]["model"] == MODEL
    answer = run(*ASK)
    assert answer["start"]["how"] == "resumed"
    assert answer["text"] == warm.json(*ASK)["text"]

    imported = modern.json(*importing)  # another C library: built here of the same files
    assert imported["snapshot"]["model"] == MODEL
