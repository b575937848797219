"""`edgeinfer forget`: delete what models have read, which is kept as computed blocks."""

from __future__ import annotations

import argparse
from typing import ClassVar

from edgeinfer.blocks.forget import forget_all, forget_conversation, forget_model
from edgeinfer.blocks.names import model_key
from edgeinfer.errors import UsageError
from edgeinfer.host import Host
from edgeinfer.result import Result
from edgeinfer.system import paths
from edgeinfer.units import format_bytes

ALL = "all"


class ForgetResult(Result, frozen=True, kw_only=True):
    """What was deleted."""

    kind: ClassVar[str] = "forget"

    forgotten: tuple[str, ...]
    freed_bytes: int

    def human(self) -> str:
        return f"forgotten: {', '.join(self.forgotten)}; {format_bytes(self.freed_bytes)} freed"


def forget(options: argparse.Namespace, host: Host) -> ForgetResult:
    """Delete computed blocks of models, conversations, or all. Raises UsageError for none."""
    if not options.models and not options.conversation:
        raise UsageError("name what to forget", hint="`edgeinfer forget all` deletes everything")
    root = paths.blocks_dir()
    freed = 0
    for name in options.models:
        if name == ALL:
            freed += forget_all(root)
            continue
        files = host.files(name)
        freed += forget_model(root, model_key(files.sha256, files.paths))
    for conversation in options.conversation:
        freed += forget_conversation(root, conversation)
    return ForgetResult(forgotten=(*options.models, *options.conversation), freed_bytes=freed)
