"""Manifests and messages are read as they were written; truncated ones are refused."""

import contextlib
import os
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.config.load_options import LOAD_OPTIONS
from edgeinfer.errors import SnapshotCorruptError, SnapshotStaleError, SnapshotUnsafeError, UsageError
from edgeinfer.launcher import messages
from edgeinfer.snapshot_format import storage

from .conftest import manifest

text_values = st.text(
    st.characters(exclude_characters="\0\r\x85\u2028\u2029", exclude_categories=("Cs", "Zl", "Zp")),
    max_size=30,
)


@given(
    st.dictionaries(st.sampled_from(["cpu", "kernel", "user"]), text_values),
    st.lists(text_values, max_size=4),
)
def test_a_manifest_is_read_as_it_was_written(keys, paths):
    files = {f"/{path}": f"{n} {n * 1000} {n}" for n, path in enumerate(paths)}
    options = {"n_ctx": "8"}
    content = {"keys": keys, "files": files, "images": {"memory.img": 5}}
    document = manifest(**content, requested=options, actual=options)
    assert vars(storage.parse_manifest(storage.manifest_text(document), "here")) == vars(document)


def test_every_truncation_of_a_manifest_is_refused():
    text = storage.manifest_text(manifest(images={"memory.img": 5}))
    for length in range(len(text)):
        with pytest.raises((SnapshotCorruptError, SnapshotStaleError)):
            storage.parse_manifest(text[:length], "here")


def test_another_version_is_stale_and_names_the_schema():
    text = storage.manifest_text(manifest())
    text = text.replace(f"{storage.MAGIC}\t{storage.VERSION}", f"{storage.MAGIC}\t999")
    with pytest.raises(SnapshotStaleError) as raised:
        storage.parse_manifest(text, "here")
    assert raised.value.key == "schema"


@pytest.mark.parametrize("model", ["a/b/../c", "../../etc", ".hidden", "x:y@z,w", "/tmp/m.gguf", "é"])
def test_a_safe_name_is_one_component_without_separators(model):
    name = storage.safe_name(model)
    assert name == os.path.basename(name)
    assert not set("/@,:") & set(name)
    assert not name.startswith(".")


def test_two_files_of_the_same_name_have_different_snapshots():
    assert storage.safe_name("/a/m.gguf") != storage.safe_name("/b/m.gguf")


def test_names_carry_the_options_or_what_was_given():
    assert storage.snapshot_name("m", {"n_ctx": "8192", "kv_type": "q8_0"}) == "m,kv_type=q8_0,ctx=8192"
    assert storage.snapshot_name("m", {"n_ctx": "8192"}, "work") == "m,work"
    adapters = {"lora": "/a/red.gguf:0.5,/b/v1.2-blue.gguf"}
    assert storage.snapshot_name("m", adapters).startswith("m,lora=red+v1.2-blue+")
    assert storage.model_prefix_of("m,work") == "m"


values = st.text("ab09._+-/:,", min_size=1)


@given(st.dictionaries(st.sampled_from([o.field for o in LOAD_OPTIONS]), values, min_size=1))
def test_no_name_that_a_user_may_choose_is_that_of_options(requested):
    name = storage.snapshot_name("m", requested)
    assert storage.user_name_of(name) == ""
    with pytest.raises(UsageError):
        storage.refuse_bad_name(name.partition(storage.OPTION_SEPARATOR)[2])


def test_generations_are_newest_first_and_only_published_ones(tmp_path):
    for generation, published in ((1, True), (2, True), (3, False)):
        folder = tmp_path / storage.folder_name("m", generation, "p" if generation == 1 else "q")
        folder.mkdir()
        if published:
            (folder / storage.MANIFEST).touch()
    folders = storage.generations(str(tmp_path))
    assert [os.path.basename(folder) for folder in folders["m"]] == [
        storage.folder_name("m", n, program) for n, program in ((2, "q"), (1, "p"))
    ]
    of_one = storage.generations(str(tmp_path), "p")["m"]
    assert [storage.generation_of(folder) for folder in of_one] == [f"{1:016x}"]


def test_an_ancestor_that_others_can_write_is_refused(tmp_path):
    above = tmp_path / "above"
    (above / "snapshots").mkdir(parents=True)
    storage.refuse_unsafe_ancestors(str(above / "snapshots"))
    above.chmod(0o777)
    with pytest.raises(SnapshotUnsafeError):
        storage.refuse_unsafe_ancestors(str(above / "snapshots"))
    above.chmod(0o1777)
    storage.refuse_unsafe_ancestors(str(above / "snapshots"))


@pytest.mark.parametrize("is_relative", [False, True])
def test_folder_of_each_link_on_the_way_is_checked(tmp_path, is_relative):
    folders = [tmp_path / f"folder{i}/inner" for i in range(4)]
    for folder in folders:
        folder.mkdir(parents=True)
    for i, folder in enumerate(folders[:-1]):
        target = Path("../..", f"folder{i + 1}/inner/next") if is_relative else folders[i + 1] / "next"
        (folder / "next").symlink_to(target)
    (folders[-1] / "next/snapshots").mkdir(parents=True)
    (tmp_path / "root").symlink_to("/")
    path = str(folders[0] / "next/snapshots")
    storage.refuse_unsafe_ancestors(path)
    storage.refuse_unsafe_ancestors(f"{tmp_path}/root{path}")
    for folder in [folders[-1] / "next", *(f for inner in folders for f in (inner, inner.parent))]:
        folder.chmod(0o777)
        for start in (path, f"{tmp_path}/root{path}"):
            with pytest.raises(SnapshotUnsafeError, match="other users can write to"):
                storage.refuse_unsafe_ancestors(start)
        folder.chmod(0o755)


# --- messages


texts = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)))


@given(
    st.builds(
        messages.LaunchRequest,
        role=texts,
        argv=st.lists(texts).map(tuple),
        options=st.binary(max_size=50),
        is_named=st.booleans(),
        limits=st.dictionaries(texts, texts, max_size=4),
        exec_ns=st.integers(),
    )
)
def test_messages_survive_encoding(request):
    assert vars(messages.decode(messages.encode(request))).items() >= vars(request).items()


@given(st.binary(max_size=64))
def test_garbage_decodes_to_a_message_or_value_error(body):
    with contextlib.suppress(ValueError):
        messages.decode(body)


def test_descriptors_and_long_messages_go_through():
    sender_end, right = socket.socketpair()
    reader, writer = os.pipe()
    big = messages.Payload(content=os.urandom(3 << 20))
    sender = threading.Thread(target=messages.send, args=(sender_end, big, [writer]))
    sender.start()
    received = messages.receive(right)
    sender.join()
    message, fds = received
    assert (message == big, len(fds)) == (True, 1)
    os.write(fds[0], b"through")
    assert os.read(reader, 7) == b"through"
    assert not os.get_inheritable(fds[0])
    for fd in (reader, writer, *fds):
        os.close(fd)
    sender_end.close()
    assert messages.receive(right) is None
    right.close()


def test_torn_message_ends_the_stream():
    sender_end, right = socket.socketpair()
    sender_end.sendall((100).to_bytes(4, "little") + messages.encode(messages.Exit(code=0)))
    sender_end.close()
    assert messages.receive(right) is None
    right.close()
