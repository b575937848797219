"""Baking made dumps: what is mapped, what is left to CRIU, and which pages are zero."""

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.errors import DumpError
from edgeinfer.snapshots.builder import bake, criu_images
from edgeinfer.snapshots.builder.criu_images import Field, ImageMessage

PAGE = bake.PAGE
PID = 30000
ANON = criu_images.STATUS_REGULAR | criu_images.STATUS_ANON_PRIVATE
FILE = criu_images.STATUS_REGULAR | criu_images.STATUS_FILE_PRIVATE
PRESENT = 4


def area(
    start: int, pages: int, status: int = ANON, flags: int = 0x22, offset: int = 0
) -> ImageMessage:
    protection, fd = 3, 1
    numbers = (start, start + pages * PAGE, offset, 0, protection, flags, status, fd)
    return ImageMessage.of(dict(enumerate(numbers, 1)))


class Dump:
    """A made dump of a process: memory areas, and content by address."""

    def __init__(self, folder: Path, areas: list[ImageMessage], content: dict[int, bytes]) -> None:
        self.folder, self.memory = folder / "images", folder / "memory.img"
        self.folder.mkdir()
        self.write(f"mm-{PID}.img", ImageMessage.of({1: 0}).with_parts(criu_images.MM_AREAS, areas))
        runs = ({1: address, 2: len(data) // PAGE, 4: PRESENT} for address, data in content.items())
        self.write(f"pagemap-{PID}.img", ImageMessage.of({1: 1}), *map(ImageMessage.of, runs))
        (self.folder / "pages-1.img").write_bytes(b"".join(content.values()))
        self.write("files.img", ImageMessage.of({1: 1, 2: 7}))
        thread = ImageMessage.of({3: 38, 4: 5, 9: 1})
        core = ImageMessage.of({1: 1}).with_parts(criu_images.CORE_THREAD, [thread])
        self.write(f"core-{PID}.img", core)

    def write(self, name: str, *messages: ImageMessage) -> None:
        image = criu_images.Image(b"\x19CVTF\x17\x03\x54", list(messages))
        criu_images.write(self.folder / name, image)

    def first(self, name: str) -> ImageMessage:
        return criu_images.read(self.folder / name).messages[0]

    def areas(self) -> list[ImageMessage]:
        return self.first(f"mm-{PID}.img").parts(criu_images.MM_AREAS)

    def bake(self) -> bake.BakeResult:
        return bake.bake(self.folder, self.memory, PID, lambda fraction: None)

    def restored_pages(self) -> dict[int, bytes | None]:
        """Return each page's content after a restore; None if another file is mapped there."""
        memory: dict[int, bytes | None] = {}
        for a in self.areas():
            start, stop, offset, file = (a.number(n) for n in (1, 2, 3, 4))
            is_file = a.number(criu_images.AREA_STATUS) & criu_images.STATUS_FILE_PRIVATE
            for address in range(start, stop, PAGE):
                if file == 8:
                    where = offset + address - start
                    memory[address] = self.memory.read_bytes()[where : where + PAGE]
                else:
                    memory[address] = None if is_file else bytes(PAGE)
        pages = (self.folder / "pages-1.img").read_bytes()
        address = 0
        for entry in criu_images.read(self.folder / f"pagemap-{PID}.img").messages[1:]:
            for n in range(entry.number(2)):
                memory[entry.number(1) + n * PAGE] = pages[address : address + PAGE]
                address += PAGE
        assert address == len(pages)
        return memory


def random_pages(n: int) -> bytes:
    return os.urandom(n * PAGE)


def test_memory_is_what_it_was_and_hardly_anything_is_left_to_read(tmp_path):
    content = {0x100000: random_pages(64), 0x180000: random_pages(3), 0x1C0000: random_pages(20)}
    dump = Dump(tmp_path, [area(0x100000, 256)], content)
    baked = dump.bake()
    restored = dump.restored_pages()
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
    restored = dump.restored_pages()
    assert b"".join(restored[address] for address in sorted(restored)) == data


def test_zeros_over_a_file_stay_zeros_and_do_not_show_the_file(tmp_path):
    dump = Dump(tmp_path, [area(0x100000, 64, FILE, 2, offset=0x5000)], {0x100000: bytes(32 * PAGE)})
    dump.bake()
    restored = dump.restored_pages()
    assert all(restored[0x100000 + n * PAGE] == bytes(PAGE) for n in range(32))
    assert restored[0x100000 + 40 * PAGE] is None


def test_the_rest_of_a_file_s_area_keeps_its_place_in_the_file(tmp_path):
    dump = Dump(tmp_path, [area(0x100000, 64, FILE, 2, offset=0x5000)], {0x110000: random_pages(16)})
    dump.bake()
    places = [(a.number(1), a.number(3)) for a in dump.areas() if a.number(4) != 8]
    assert places == [(0x100000, 0x5000), (0x120000, 0x25000)]


@pytest.mark.parametrize(
    ("status", "flags"), [(ANON, 0x122), (criu_images.STATUS_REGULAR | criu_images.STATUS_VDSO, 0x22)]
)
def test_the_stack_and_the_vdso_are_left_to_criu(tmp_path, status, flags):
    data = random_pages(32)
    dump = Dump(tmp_path, [area(0x100000, 32, status, flags)], {0x100000: data})
    baked = dump.bake()
    assert baked.left_bytes == 32 * PAGE
    assert dump.restored_pages()[0x100000] == data[:PAGE]


def test_a_dump_that_does_not_add_up_is_refused(tmp_path):
    dump = Dump(tmp_path, [area(0x100000, 4)], {0x100000: random_pages(4)})
    (dump.folder / "pages-1.img").write_bytes(b"short")
    with pytest.raises(DumpError, match="dump is incomplete"):
        dump.bake()


def test_truncated_image_is_an_error_of_the_dump(tmp_path):
    dump = Dump(tmp_path, [area(0x100000, 4)], {0x100000: random_pages(4)})
    image = next(dump.folder.glob("pagemap-*.img"))
    image.write_bytes(image.read_bytes()[:-1])
    with pytest.raises(DumpError, match=f"truncated image: {image}"):
        dump.bake()


field = st.tuples(
    st.integers(1, 500), st.just(criu_images.VARINT), st.integers(0, 2**64 - 1)
) | st.tuples(st.integers(1, 500), st.just(criu_images.BYTES), st.binary(max_size=40))


@given(st.lists(field, max_size=10))
def test_a_message_passes_through_unchanged(message):
    assert ImageMessage.decode(ImageMessage(map(Field._make, message)).encode()) == message


@given(st.binary(max_size=60))
def test_garbage_is_refused_in_our_words(data):
    with contextlib.suppress(DumpError):
        ImageMessage.decode(data)
