"""uninstall, `doctor --verify` and the man page, run from this checkout."""

import argparse
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "build"))

import manual

from edgeinfer.cli.parser import VERBS
from edgeinfer.cli.verbs import doctor, uninstall, version
from edgeinfer.errors import EdgeInferError, InterruptedByUser, ShippingError, UsageError
from edgeinfer.host import Host
from edgeinfer.platform import paths
from edgeinfer.shipping import shipped


def options(**values):
    return argparse.Namespace(**{"yes": False, "keep_data": False, "name": None, **values})


def fill():
    """A model, a snapshot and a configuration, as a person has them."""
    for path in (
        paths.models_dir() / "m/m.gguf",
        paths.snapshots_dir() / "s/memory.img",
        paths.config_dir() / "config.toml",
    ):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * 5000)


def test_licences_are_listed_from_the_shipped_file(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "app_dir", lambda: tmp_path)
    (tmp_path / "share").mkdir()
    part = {"name": "msgspec", "version": "0.19", "licence": "BSD-3-Clause"}
    (tmp_path / "share/licences.json").write_text(json.dumps([part]))
    found = version.run(options(licenses=True), Host())
    assert found.human().startswith("msgspec 0.19  BSD-3-Clause\n")
    assert f"{tmp_path}/share/licences" in found.human()


def test_licences_outside_the_shipped_file_are_refused_with_a_hint():
    with pytest.raises(ShippingError, match="not the shipped file"):
        version.run(options(licenses=True), Host())


def test_uninstall_asks_with_everything_it_would_remove(answer_no, capsys):
    fill()
    with pytest.raises(InterruptedByUser):
        uninstall.run(options(), Host())
    asked = capsys.readouterr().err
    for path in (paths.models_dir(), paths.snapshots_dir(), paths.config_dir()):
        assert str(path) in asked
        assert path.exists()


def test_uninstall_without_a_terminal_is_refused(monkeypatch):
    fill()
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="not a terminal"):
        uninstall.run(options(), Host())


def test_uninstall_removes_everything():
    fill()
    found = uninstall.run(options(yes=True), Host())
    assert {"models", "snapshots", "configuration"} <= {part.what for part in found.removed}
    assert not paths.models_dir().exists()
    assert not paths.snapshots_dir().exists()
    assert not paths.data_dir().exists()


def test_uninstall_keeps_what_a_person_made():
    fill()
    found = uninstall.run(options(keep_data=True, yes=True), Host())
    assert {part.what for part in found.kept} == {"models", "configuration"}
    assert (paths.models_dir() / "m/m.gguf").exists()
    assert not paths.snapshots_dir().exists()


def test_uninstall_with_nothing_there():
    assert uninstall.run(options(), Host()).human() == "there was nothing to remove"


def test_self_check_is_for_the_shipped_file():
    assert shipped.app_dir() is None
    with pytest.raises(EdgeInferError, match="not the shipped file"):
        doctor.run(options(verify=True), Host())


def test_certificates_of_this_system_unless_the_environment_names_some(monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    monkeypatch.setattr(shipped, "_AUTHORITIES", ("/nowhere", __file__))
    shipped.trust_certificates()
    import os

    assert os.environ.pop("SSL_CERT_FILE") == __file__
    monkeypatch.setenv("SSL_CERT_FILE", "/mine")
    shipped.trust_certificates()
    assert os.environ["SSL_CERT_FILE"] == "/mine"


def test_man_page_has_every_verb_and_exit_code():
    page = manual.page()
    for verb in VERBS:
        assert f".SS {verb}".replace("-", "\\-") in page
    assert r"\fB130\fR" in page
    assert not any(line.startswith("'") for line in page.splitlines())
