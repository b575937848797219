"""Deleting what was kept: everything, one model's, or one conversation's that no other has read too.

A process that has something of it in its own memory keeps that until it ends. The secret stays: names
that running processes make from now on must be those that the next process looks for.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from edgeinfer.blocks import limits
from edgeinfer.blocks.names import owner_name, read_secret
from edgeinfer.blocks.store import model_folder
from edgeinfer.system import paths


def forget_all(root: Path) -> int:
    """Delete all but the secret that names are keyed with; the bytes that were freed."""
    freed = sum(block.n_bytes for block in limits.list_blocks(root))
    if root.is_dir():
        for folder in [path for path in root.iterdir() if path.is_dir()]:
            shutil.rmtree(folder, ignore_errors=True)
    return freed


def forget_model(root: Path, model: str) -> int:
    """Delete the blocks of a model, named by its key; the bytes that were freed."""
    folder = root / model_folder(model)
    freed = sum(block.n_bytes for block in limits.list_blocks(folder))
    shutil.rmtree(folder, ignore_errors=True)
    return freed


def forget_conversation(root: Path, conversation: str) -> int:
    """Delete what a conversation has read and no other has; the bytes that were freed."""
    owners = root / "owners"
    if not owners.is_dir():
        return 0
    paths.private_dir(root)
    own = owners / owner_name(read_secret(root / "secret"), conversation)
    written = limits.owned_names(own)
    for other in owners.iterdir():
        if other != own:
            written -= limits.owned_names(other)
    freed = 0
    for block in limits.list_blocks(root):
        if block.path.name.removesuffix(limits.SUFFIX) in written:
            block.path.unlink(missing_ok=True)
            freed += block.n_bytes
    own.unlink(missing_ok=True)
    return freed
