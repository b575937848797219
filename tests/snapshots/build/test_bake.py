"""Baking on images made here: what is mapped, what is left to CRIU, and what must not become zeros."""

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.errors import DumpError, SnapshotCorruptError
from edgeinfer.snapshots.build import bake, criu_images

PAGE = bake.PAGE
PID = 30000
ANON = criu_images.AREA_REGULAR | criu_images.AREA_ANON_PRIVATE
FILE = criu_images.AREA_REGULAR | criu_images.AREA_FILE_PRIVATE
PRESENT = 4


def varints(**fields: int) -> list:
    numbers = {
        "start": 1,
        "end": 2,
        "offset": 3,
        "file": 4,
        "prot": 5,
        "flags": 6,
        "status": 7,
        "fd": 8,
    }
    return [(numbers[name], criu_images.VARINT, value) for name, value in fields.items()]


def area(start: int, pages: int, status: int = ANON, flags: int = 0x22, offset: int = 0) -> list:
    return varints(
        start=start,
        end=start + pages * PAGE,
        offset=offset,
        file=0,
        prot=3,
        flags=flags,
        status=status,
        fd=1,
    )


class Dump:
    """A made dump of one process: areas, and content at addresses."""

    def __init__(self, folder: Path, areas: list, content: dict[int, bytes]) -> None:
        self.folder, self.memory = folder / "images", folder / "memory.img"
        self.folder.mkdir()
        mm = [
            (1, criu_images.VARINT, 0),
            *((criu_images.MM_VMAS, criu_images.BYTES, criu_images.encode(a)) for a in areas),
        ]
        self.image(f"mm-{PID}.img", [mm])
        entries = [[(1, criu_images.VARINT, 1)]]
        for start, data in content.items():
            entries.append(
                [
                    (1, criu_images.VARINT, start),
                    (2, criu_images.VARINT, len(data) // PAGE),
                    (4, criu_images.VARINT, PRESENT),
                ]
            )
        self.image(f"pagemap-{PID}.img", entries)
        (self.folder / "pages-1.img").write_bytes(b"".join(content.values()))
        self.image("files.img", [[(1, criu_images.VARINT, 1), (2, criu_images.VARINT, 7)]])
        thread = [(3, criu_images.VARINT, 38), (4, criu_images.VARINT, 5), (9, criu_images.VARINT, 1)]
        self.image(
            f"core-{PID}.img",
            [
                [
                    (1, criu_images.VARINT, 1),
                    (criu_images.CORE_THREAD, criu_images.BYTES, criu_images.encode(thread)),
                ]
            ],
        )

    def image(self, name: str, messages: list) -> None:
        criu_images.write(
            self.folder / name,
            criu_images.Image(b"\x19CVTF\x17\x03\x54", [criu_images.encode(m) for m in messages]),
        )

    def bake(self) -> bake.Baked:
        return bake.bake(self.folder, self.memory, PID, lambda done, total: None)

    def restored(self) -> dict[int, bytes | None]:
        """Every page as a restore would have it; None where another file's page shows."""
        found: dict[int, bytes | None] = {}
        for _, _, raw in [
            f
            for f in criu_images.decode(criu_images.read(self.folder / f"mm-{PID}.img").messages[0])
            if f[0] == 14
        ]:
            a = criu_images.decode(raw)
            start, end, offset = (criu_images.number(a, n) for n in (1, 2, 3))
            for at in range(start, end, PAGE):
                status, file = (
                    criu_images.number(a, criu_images.AREA_STATUS),
                    criu_images.number(a, criu_images.AREA_FILE),
                )
                if file == 8:
                    where = offset + at - start
                    found[at] = self.memory.read_bytes()[where : where + PAGE]
                else:
                    found[at] = None if status & criu_images.AREA_FILE_PRIVATE else bytes(PAGE)
        pages = (self.folder / "pages-1.img").read_bytes()
        at = 0
        for raw in criu_images.read(self.folder / f"pagemap-{PID}.img").messages[1:]:
            entry = criu_images.decode(raw)
            for n in range(criu_images.number(entry, 2)):
                found[criu_images.number(entry, 1) + n * PAGE] = pages[at : at + PAGE]
                at += PAGE
        assert at == len(pages)
        return found


def random_pages(n: int) -> bytes:
    return os.urandom(n * PAGE)


def test_memory_is_what_it_was_and_hardly_anything_is_left_to_read(tmp_path):
    content = {0x100000: random_pages(64), 0x180000: random_pages(3), 0x1C0000: random_pages(20)}
    dump = Dump(tmp_path, [area(0x100000, 256)], content)
    baked = dump.bake()
    restored = dump.restored()
    for start, data in content.items():
        for n in range(len(data) // PAGE):
            assert restored[start + n * PAGE] == data[n * PAGE : (n + 1) * PAGE]
    assert restored[0x150000] == bytes(PAGE)
    assert baked.left_bytes == 3 * PAGE


def test_zeros_take_no_room_and_are_zeros_again(tmp_path):
    data = random_pages(32) + bytes(512 * PAGE) + random_pages(32)
    dump = Dump(tmp_path, [area(0x100000, 576)], {0x100000: data})
    baked = dump.bake()
    assert baked.disk_bytes < 100 * PAGE < baked.memory_bytes
    restored = dump.restored()
    assert b"".join(restored[at] for at in sorted(restored)) == data


def test_zeros_over_a_file_stay_zeros_and_do_not_show_the_file(tmp_path):
    dump = Dump(tmp_path, [area(0x100000, 64, FILE, 2, offset=0x5000)], {0x100000: bytes(32 * PAGE)})
    dump.bake()
    restored = dump.restored()
    assert all(restored[0x100000 + n * PAGE] == bytes(PAGE) for n in range(32))
    assert restored[0x100000 + 40 * PAGE] is None


def test_the_rest_of_a_file_s_area_keeps_its_place_in_the_file(tmp_path):
    dump = Dump(tmp_path, [area(0x100000, 64, FILE, 2, offset=0x5000)], {0x110000: random_pages(16)})
    dump.bake()
    areas = [
        criu_images.decode(f[2])
        for f in criu_images.decode(criu_images.read(dump.folder / f"mm-{PID}.img").messages[0])
        if f[0] == 14
    ]
    assert [
        (criu_images.number(a, 1), criu_images.number(a, 3))
        for a in areas
        if criu_images.number(a, 4) != 8
    ] == [(0x100000, 0x5000), (0x120000, 0x25000)]


@pytest.mark.parametrize(
    ("status", "flags"), [(ANON, 0x122), (criu_images.AREA_REGULAR | criu_images.AREA_VDSO, 0x22)]
)
def test_the_stack_and_the_vdso_are_left_to_criu(tmp_path, status, flags):
    data = random_pages(32)
    dump = Dump(tmp_path, [area(0x100000, 32, status, flags)], {0x100000: data})
    baked = dump.bake()
    assert baked.left_bytes == 32 * PAGE
    assert dump.restored()[0x100000] == data[:PAGE]


def test_niceness_is_forgotten(tmp_path):
    dump = Dump(tmp_path, [area(0x100000, 1)], {0x100000: random_pages(1)})
    dump.bake()
    core = criu_images.decode(criu_images.read(dump.folder / f"core-{PID}.img").messages[0])
    assert criu_images.part(core, criu_images.CORE_THREAD) == [(9, criu_images.VARINT, 1)]


def test_a_dump_that_does_not_add_up_is_refused(tmp_path):
    dump = Dump(tmp_path, [area(0x100000, 4)], {0x100000: random_pages(4)})
    (dump.folder / "pages-1.img").write_bytes(b"short")
    with pytest.raises(DumpError):
        dump.bake()


field = st.tuples(
    st.integers(1, 500), st.just(criu_images.VARINT), st.integers(0, 2**64 - 1)
) | st.tuples(st.integers(1, 500), st.just(criu_images.BYTES), st.binary(max_size=40))


@given(st.lists(field, max_size=10))
def test_a_message_passes_through_unchanged(message):
    assert criu_images.decode(criu_images.encode(message)) == message


@given(st.binary(max_size=60))
def test_garbage_is_refused_in_our_words(data):
    with contextlib.suppress(SnapshotCorruptError):
        criu_images.decode(data)
