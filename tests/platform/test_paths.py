"""Directories follow the platform's convention, and only this user can access private ones."""

import os
import stat
from pathlib import Path

import platformdirs
import pytest

from edgeinfer.errors import SnapshotMissingError, SnapshotUnsafeError
from edgeinfer.platform import paths


@pytest.mark.parametrize("kind", ["config", "data", "cache", "state"])
@pytest.mark.parametrize("set_variable", [True, False])
def test_directories_are_platformdirs_own(monkeypatch, tmp_path, kind, set_variable):
    monkeypatch.delenv("EDGEINFER_HOME")
    if set_variable:
        monkeypatch.setenv(f"XDG_{kind.upper()}_HOME", str(tmp_path))
    folder = getattr(paths, f"{kind}_dir")()
    assert folder == getattr(platformdirs, f"user_{kind}_path")("edgeinfer", appauthor=False)


def test_one_variable_moves_everything(monkeypatch, tmp_path):
    monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path))
    kinds = ("config", "models", "snapshots", "state")
    places = [Path(paths.runtime_path()), *(getattr(paths, f"{kind}_dir")() for kind in kinds)]
    assert all(folder.is_relative_to(tmp_path) for folder in places)
    assert len(set(places)) == len(places)


def test_private_dir_is_made_0700(tmp_path):
    folder = paths.private_dir(tmp_path / "a" / "b")
    assert folder.stat().st_mode & 0o777 == 0o700


def wide(path):
    path.chmod(0o755)


def link(path):
    path.rename(path.with_name("target"))
    path.symlink_to("target")


def given_away(path):
    if os.getuid() != 0:
        pytest.skip("only root can give a directory away")
    os.chown(path, 12345, 12345)


@pytest.mark.parametrize(
    ("make", "message", "hint"),
    [
        (wide, "other users may access {}: its mode must be 700", "chmod go= {}"),
        (link, "{} must be a directory, not a symlink", "remove or rename {}"),
        (
            given_away,
            "{} belongs to user 12345, not to you",
            "run edgeinfer as that user, or rename {}",
        ),
    ],
)
def test_private_dir_refuses_what_others_may_enter(tmp_path, make, message, hint):
    path = paths.private_dir(tmp_path / "folder")
    make(path)
    with pytest.raises(SnapshotUnsafeError) as caught:
        paths.private_dir(path)
    assert (caught.value.message, caught.value.hint) == (message.format(path), hint.format(path))


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o750])
def test_a_folder_that_others_can_enter_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(SnapshotUnsafeError, match="other users may access"):
        paths.refuse_unsafe(str(tmp_path), directory=True)


def test_a_missing_file_is_missing_and_a_folder_is_no_file(tmp_path):
    with pytest.raises(SnapshotMissingError, match="cannot be read: No such file"):
        paths.refuse_unsafe(str(tmp_path / "no"), directory=False)
    with pytest.raises(SnapshotUnsafeError, match=r"must be a regular file$"):
        paths.refuse_unsafe(str(tmp_path), directory=False)


def test_a_new_folder_and_its_new_parents_are_for_this_user_only(tmp_path):
    mask = os.umask(0o002)
    try:
        paths.make_folder(tmp_path / "a/b/c")
        paths.make_folder(tmp_path / "a/b")
    finally:
        os.umask(mask)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "a/b", "a/b/c")]
    assert modes == [0o700] * 3
