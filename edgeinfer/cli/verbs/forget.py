"""`edgeinfer forget`: delete the cached prefixes of models or conversations."""

from __future__ import annotations

import argparse

from edgeinfer.cli.options import add_yes
from edgeinfer.cli.parser import add_option
from edgeinfer.cli.result import Result
from edgeinfer.cli.terminal import confirm
from edgeinfer.errors import UsageError
from edgeinfer.host import EngineHost
from edgeinfer.platform import paths
from edgeinfer.units import format_bytes

ALL = "all"


class ForgetResult(Result, frozen=True, kw_only=True):
    forgotten: tuple[str, ...]
    freed_bytes: int

    def human(self) -> str:
        return f"forgotten: {', '.join(self.forgotten)}; {format_bytes(self.freed_bytes)} freed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", metavar="MODEL", help="models or GGUF files, or `all`")
    add_yes(parser)
    help = "a conversation's own prefixes: chat-NUMBER, or a request's prompt_cache_key"
    add_option(parser, "--conversation ID...", help)


def run(options: argparse.Namespace, host: EngineHost) -> ForgetResult:
    """Delete cached prefixes. Raises UsageError without names, InterruptedByUser if not confirmed."""
    # slow import: numpy takes 80 ms
    from edgeinfer.runtime.prefix_cache import kv_block, retention

    if not options.models and not options.conversation:
        raise UsageError("name the models to forget", hint="`edgeinfer forget all` deletes everything")
    root = paths.blocks_dir()
    freed = 0
    is_all = ALL in options.models
    named = "every model" if is_all else ", ".join((*options.models, *options.conversation))
    confirm(f"Delete the cached prefixes of {named}?", yes=options.yes, needs_yes=is_all)
    # find all models before anything is deleted: an unknown one raises an error
    models = [host.files(name) for name in options.models if name != ALL]
    freed += retention.forget_all(root) if is_all else 0
    for files in models:
        freed += retention.forget_model(root, kv_block.model_key(files.sha256, files.paths))
    freed_of = {name: retention.forget_conversations(root, name) for name in options.conversation}
    if unknown := [name for name, n_bytes in freed_of.items() if not n_bytes]:
        raise UsageError(
            f"conversation {', '.join(map(repr, unknown))} has no cached prefixes of its own",
            hint="give `chat-NUMBER` (a conversation's number) or the `prompt_cache_key` of requests",
        )
    freed += sum(freed_of.values())
    return ForgetResult(forgotten=(*options.models, *options.conversation), freed_bytes=freed)
