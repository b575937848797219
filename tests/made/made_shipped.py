"""Other versions of the shipped file, made of a built one."""

import sys
from collections.abc import Mapping
from pathlib import Path

from edgeinfer.shipping import payload
from edgeinfer.shipping.payload import open_shipped

sys.path.insert(0, str(Path(__file__).parents[2] / "build"))

import assemble
import bootloader
import pack

#: Where the build keeps compressed blocks.
BLOCKS = bootloader.cache_dir() / "blocks"


def variant(
    binary: Path, folder: Path, changes: Mapping[str, str], version: str = "", cache: Path = BLOCKS
) -> tuple[Path, str]:
    """Write another version of the shipped file into `folder`: the same blocks but for the small files in
    `changes`. Returns it and the name of its application's folder.
    """
    shipped = open_shipped(binary)
    with binary.open("rb") as file:
        index = payload.read_index(file, shipped)
        tree = folder / "tree"
        for number, block in enumerate(index.blocks):
            entries = [e for e in index.files if e.block == number]
            for entry, content in payload.split_block(
                payload.block_bytes(file.fileno(), shipped, block), entries, binary
            ):
                target = tree / entry.path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
                target.chmod(entry.mode)
        for path, linked in index.links:
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).symlink_to(linked)
        file.seek(shipped.archive_offset)
        (folder / "archive").write_bytes(file.read())
    for name, text in changes.items():
        (tree / name).write_text(text)
    packed = pack.pack(tree, version or index.version, index.relocate, cache)
    files = (folder / "archive", folder / "edgeinfer")
    assemble.assemble(bootloader.build(), packed.name, packed.data, *files)
    return folder / "edgeinfer", packed.name
