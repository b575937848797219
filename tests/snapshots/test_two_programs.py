"""Two copies of the program in one user's home: neither takes the other's snapshots away."""

from __future__ import annotations

import shutil

import pytest

pytestmark = pytest.mark.criu

MODEL = "small"


def test_each_resumes_its_own_and_the_one_that_is_gone_is_pruned(user, place):
    copy = place.folder / "second"
    shutil.copytree(place.sources, copy)
    second = {"env": {"PYTHONPATH": str(copy)}}
    user.settings("[snapshots]\nauto-warm = false\n")
    user.run("warm", MODEL, "--quiet").check()
    user.run("warm", MODEL, "--quiet", **second).check()
    assert user.ask().start["how"] == "resumed"
    assert user.ask(**second).start["how"] == "resumed"
    states = [s["state"] for s in user.run("snapshots", "--json").result["snapshots"]]
    assert sorted(states) == [f"of another program: {copy}/edgeinfer", "ready"]
    assert user.run("snapshots", "prune", "--json").result["removed"] == []

    shutil.rmtree(copy)
    assert user.run("snapshots", "prune", "--json").result["removed"] == [MODEL]
    assert user.ask().start["how"] == "resumed"
