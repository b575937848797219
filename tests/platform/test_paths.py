"""Directories follow the platform's convention, and private ones belong to this user alone."""

import os

import platformdirs
import pytest

from edgeinfer.errors import SnapshotUnsafeError
from edgeinfer.platform import paths


@pytest.mark.parametrize("kind", ["config", "data", "cache", "state"])
@pytest.mark.parametrize("set_variable", [True, False])
def test_directories_are_platformdirs_own(monkeypatch, tmp_path, kind, set_variable):
    monkeypatch.delenv("EDGEINFER_HOME")
    if set_variable:
        monkeypatch.setenv(f"XDG_{kind.upper()}_HOME", str(tmp_path))
    ours = getattr(paths, f"{kind}_dir")()
    assert ours == getattr(platformdirs, f"user_{kind}_path")("edgeinfer", appauthor=False)


def test_one_variable_moves_everything(monkeypatch, tmp_path):
    monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path))
    kinds = ("config", "models", "snapshots", "state", "runtime")
    places = [getattr(paths, f"{kind}_dir")() for kind in kinds]
    assert all(place.is_relative_to(tmp_path) for place in places)
    assert len(set(places)) == len(places)


def test_private_dir_is_made_0700(tmp_path):
    made = paths.private_dir(tmp_path / "a" / "b")
    assert made.stat().st_mode & 0o777 == 0o700


def test_private_dir_refuses_wide_modes_and_symlinks(tmp_path):
    wide = tmp_path / "wide"
    wide.mkdir()
    wide.chmod(0o755)
    with pytest.raises(SnapshotUnsafeError):
        paths.private_dir(wide)
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    os.symlink(target, tmp_path / "link")
    with pytest.raises(SnapshotUnsafeError):
        paths.private_dir(tmp_path / "link")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_private_dir_refuses_another_owner(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 12345, 12345)
    with pytest.raises(SnapshotUnsafeError):
        paths.private_dir(theirs)
