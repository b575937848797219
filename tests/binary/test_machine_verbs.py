"""`version --licenses`, `doctor --verify` and the man page, run from this checkout."""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "build"))

import manual

from edgeinfer.cli.parser import VERBS
from edgeinfer.cli.verbs import doctor, version
from edgeinfer.errors import EdgeInferError, ShippingError
from edgeinfer.host import EngineHost
from edgeinfer.shipping import shipped


def options(**values):
    return argparse.Namespace(**{"name": None, **values})


def test_licences_outside_the_shipped_file_are_refused_with_a_hint():
    with pytest.raises(ShippingError, match="--licenses needs the one-file program"):
        version.run(options(licenses=True), EngineHost())


def test_self_check_is_for_the_shipped_file():
    assert shipped.app_dir() is None
    with pytest.raises(EdgeInferError, match="but this edgeinfer is a Python package"):
        doctor.run(options(verify=True), EngineHost())


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
