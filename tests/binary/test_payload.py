"""The shipped file's format and unpacking, with a small folder and no PyInstaller."""

import json
import os
import struct
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "build"))

import assemble
import bootloader
import finish
import pack
from made_gguf import gguf_bytes

from edgeinfer.errors import EdgeInferError, ShippingError
from edgeinfer.models.progress import Job
from edgeinfer.models.pull import PullOptions, pull
from edgeinfer.models.reference import resolve
from edgeinfer.models.removal import remove_models
from edgeinfer.shipping import bundle, payload, unpack

from ..conftest import BUILD_CACHE

PROGRAM, PLACED = "bin/program", "bin/placed"
_NAMES = (payload.APP_FIELD, payload.MODEL_FIELD)
FIELDS = b"".join(name.ljust(payload.FIELD_BYTES, b"\0") for name in _NAMES)
COOKIE = payload.COOKIE.pack(payload.COOKIE_MAGIC, payload.COOKIE.size, 0, 0, 311, b"libpython")


def write_tree(folder):
    """Write a folder like the application's: text, two equal libraries, a link, an executable that names its
    own folder.
    """
    (folder / "lib").mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "note").write_text("hello\n")
    for name in ("liba.so", "libb.so"):
        (folder / "lib" / name).write_bytes(b"\x7fELF" + bytes(range(256)) * 64)
    (folder / "lib/libc.so").symlink_to("liba.so")
    program = Path("/proc/self/exe").read_bytes()
    (folder / PROGRAM).write_bytes(program[: 1 << 18])  # xz takes seconds for all of it
    (folder / PLACED).write_bytes(elf(1023))
    for name in (PROGRAM, PLACED):
        (folder / name).chmod(0o755)


def elf(length):
    """Return a minimal 64-bit ELF file with an interpreter of `length` bytes."""
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    struct.pack_into("<Q", header, 32, 64)
    struct.pack_into("<HH", header, 54, 56, 1)
    table = struct.pack("<IIQQQQQQ", 3, 4, 120, 120, 120, length + 1, length + 1, 1)
    return bytes(header) + table + b"/lib/ld.so".rjust(length, b"/") + b"\0 and the rest"


def ship(tree, folder, *, version="1.0", relocate=(), boot=b"\x7fELF", name="edgeinfer"):
    """Write a shipped file whose bootloader is `boot` and its fields, and whose archive is a cookie alone."""
    packed = pack.pack(tree, version, relocate, folder / "cache")
    (folder / "boot").write_bytes(boot + FIELDS)
    (folder / "archive").write_bytes(COOKIE)
    assemble.assemble(folder / "boot", packed.name, packed.data, folder / "archive", folder / name)
    return folder / name


@pytest.fixture
def shipped_file(tmp_path):
    write_tree(tmp_path / "tree")
    return ship(tmp_path / "tree", tmp_path)


def test_unpacks_what_was_packed(shipped_file, tmp_path):
    said = []
    app = unpack.ensure_unpacked(shipped_file, lambda done, total: said.append((done, total)))
    assert app.name == payload.open_shipped(shipped_file).app
    assert (app / "note").read_text() == "hello\n"
    assert (app / "lib/libb.so").read_bytes() == (tmp_path / "tree/lib/libb.so").read_bytes()
    assert (app / "lib/libb.so").is_symlink()  # the same content stands there once
    assert (app / PROGRAM).stat().st_mode & 0o777 == 0o755
    assert said[-1][0] == said[-1][1] == max(done for done, _ in said)
    assert unpack.ensure_unpacked(shipped_file) == app


def test_equal_folders_give_equal_payloads(tmp_path):
    for name in ("one", "two"):
        write_tree(tmp_path / name)
    os.utime(tmp_path / "two/note", (1, 1))
    first, two = (pack.pack(tmp_path / name, "1.0", (), tmp_path / "cache") for name in ("one", "two"))
    assert first == two
    (tmp_path / "two/note").write_text("hullo\n")
    assert pack.pack(tmp_path / "two", "1.0", (), tmp_path / "cache").name != first.name


@pytest.mark.parametrize(("number", "has_x86_filter"), [(62, True), (183, False)])
def test_file_of_another_processor_is_finished_here(tmp_path, monkeypatch, number, has_x86_filter):
    monkeypatch.setenv("EDGEINFER_BUILD_CACHE", str(tmp_path / "cache"))
    work = tmp_path / "work"
    write_tree(work / "tree")
    (work / "run").write_bytes(struct.pack("<4s14xH", b"\x7fELF", number) + FIELDS)
    (work / "pyinstaller").mkdir()
    (work / "pyinstaller/first.pkg").write_bytes(COOKIE)
    finish.finish(work, tmp_path / "edgeinfer")
    shipped = payload.open_shipped(tmp_path / "edgeinfer")
    with (tmp_path / "edgeinfer").open("rb") as file:
        index = payload.read_index(file, shipped)
        of_libraries = next(e.block for e in index.files if e.path == "lib/liba.so")
        file.seek(shipped.payload_offset + index.blocks[of_libraries].offset)
        block_header = file.read(24)
    # the filter's number stands after xz's magic and the block's size
    assert (block_header[14] == 4) == has_x86_filter
    assert (unpack.ensure_unpacked(tmp_path / "edgeinfer") / "note").read_text() == "hello\n"


def test_home_that_cannot_be_looked_into_is_an_error_in_words(shipped_file, monkeypatch):
    monkeypatch.setenv("EDGEINFER_HOME", "/tmp/" + "x" * 300)  # an OSError for root, too
    with pytest.raises(ShippingError, match=r"cannot unpack to .*: File name too long") as refused:
        unpack.ensure_unpacked(shipped_file)
    assert "set EDGEINFER_HOME to a folder of your own" in refused.value.hint


def test_truncated_file_is_no_shipped_file(shipped_file):
    shipped_file.write_bytes(shipped_file.read_bytes()[:-10])
    with pytest.raises(EdgeInferError, match="truncated"):
        payload.open_shipped(shipped_file)


@pytest.mark.parametrize("path", ["../outside", "/etc/outside", "a/../../outside"])
def test_index_cannot_name_a_file_outside(path):
    document = {"version": "1", "files": [[path, 420, 0, "", 0]]}
    document |= {"links": [], "blocks": [], "relocate": []}
    assert payload.parse_index(json.dumps(document).encode()) is None


@pytest.fixture
def with_model(shipped_file, tmp_path):
    """The shipped file with a model of two files inside, which is no longer in the store."""
    bodies = [gguf_bytes(tensors=[(f"blk.{i}.weight", 3000)], seed=i) for i in (1, 2)]
    for i, body in enumerate(bodies, 1):
        (tmp_path / f"x-0000{i}-of-00002.gguf").write_bytes(body)
    record = pull(str(tmp_path / "x-00001-of-00002.gguf"), options=PullOptions(name="tiny"))
    assemble.with_model(shipped_file, record, tmp_path / "with-model")
    remove_models(["tiny"])
    unpack.ensure_unpacked(tmp_path / "with-model")
    return payload.open_shipped(tmp_path / "with-model"), bodies


def test_bundled_model_is_stored_once(with_model):
    shipped, bodies = with_model
    record = bundle.store_model(shipped, Job())
    assert [path.read_bytes() for path in record.paths] == bodies
    assert resolve("tiny").files().sha256 == record.sha256
    assert (unpack.app_root() / f"{shipped.model}.model").exists()
    before = record.paths[0].stat()
    assert bundle.main([str(shipped.path)]) == 0
    assert record.paths[0].stat() == before


def test_executable_that_names_its_folder(tmp_path):
    write_tree(tmp_path / "tree")
    app = unpack.ensure_unpacked(ship(tmp_path / "tree", tmp_path, relocate=(PLACED,)))
    raw = (app / PLACED).read_bytes()
    offset, length = payload.interpreter_span(raw)
    assert raw[offset : offset + length].decode() == unpack.interpreter(app, PLACED).rjust(length, "/")
    assert raw[offset + length :] == b"\0 and the rest"


def test_path_too_long_for_its_field():
    with pytest.raises(EdgeInferError, match="too long"):
        payload.relocate(elf(100), "/" + "x" * 100)


def test_neutral_form_does_not_depend_on_the_place():
    neutral = payload.relocate(elf(1023), "")
    assert payload.relocate(payload.relocate(elf(1023), "/a/b"), "") == neutral


def test_what_a_dead_unpacking_left_is_removed(shipped_file):
    leftover = unpack.app_root() / ".unpacking-dead"
    leftover.mkdir(parents=True)
    (leftover / "half").write_bytes(b"x")
    unpack.ensure_unpacked(shipped_file)
    assert not leftover.exists()


def test_version_is_kept_while_its_file_is_there_and_removed_when_it_is_replaced(
    shipped_file, tmp_path
):
    first = unpack.ensure_unpacked(shipped_file)
    other = tmp_path / "other"
    write_tree(other / "tree")
    (other / "tree/note").write_text("a second version\n")
    second = ship(other / "tree", other)
    after = unpack.ensure_unpacked(second)
    assert unpack.versions() == sorted([first, after])
    second.replace(shipped_file)
    with unpack.locked():
        assert unpack.remove_unused(keep=after) == [first]
    assert unpack.versions() == [after]


@pytest.mark.needs("binary")
def test_fields_of_the_real_bootloader(tmp_path):
    raw = bootloader.build(BUILD_CACHE).read_bytes()
    named = assemble.with_field(raw, payload.APP_FIELD, "1.0-abc")
    assert payload.read_field(raw, payload.APP_FIELD) == ""
    assert payload.read_field(named, payload.APP_FIELD) == "1.0-abc"
    assert len(named) == len(raw)
