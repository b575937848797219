"""`edgeinfer update`: replace the one-file program by a newer release, or by the previous one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from edgeinfer import __version__
from edgeinfer.cli.options import add_quiet
from edgeinfer.cli.parser import add_option
from edgeinfer.cli.result import Result
from edgeinfer.cli.terminal import stoppable
from edgeinfer.host import EngineHost


class UpdateResult(Result, frozen=True, kw_only=True):
    """An update. `before` is the version that runs this command.

    `version` is the installed version, with `--check` the newest. `changed`: another version was
    installed.
    """

    before: str
    version: str
    changed: bool

    def human(self) -> str:
        if self.changed:
            return (
                f"edgeinfer {self.version} replaces {self.before}; running processes keep the old one\n"
                "to return to it, with its snapshots: edgeinfer update --back"
            )
        if self.version != self.before:
            return f"edgeinfer {self.version} is published, this is {self.before}: edgeinfer update"
        return f"edgeinfer {self.before} is the newest"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    add_option(which, "--check", "only show the published version")
    add_option(which, "--back", "return to the previous version, with its snapshots")
    add_quiet(parser)


def run(options: argparse.Namespace, _host: EngineHost) -> UpdateResult:
    """Update the one-file program. Raises the errors of `shipping.update`; then nothing has changed."""
    from edgeinfer.models.progress import FETCHED_IS_KEPT, Job, progress_on
    from edgeinfer.shipping import update
    from edgeinfer.shipping.update import channel, number

    program = update.own_program(replaces=not options.check)
    with update.locked() as folder:
        if not options.check:
            update.refuse_unless_ours(program, Path(sys.executable).parent.name)
        if options.back:
            return UpdateResult(before=__version__, version=update.back(program, folder), changed=True)
        update_channel = channel()
        release = update.newest(update_channel, folder)
        is_newer = number(release.version) > number(__version__)
        if is_newer and not options.check:
            with (
                progress_on(quiet=options.quiet) as report,
                stoppable(f"stopped; {FETCHED_IS_KEPT}", "run the same command again"),
            ):
                update.install(program, release, update_channel.url, folder, Job(report))
        version = release.version if is_newer else __version__
        return UpdateResult(before=__version__, version=version, changed=is_newer and not options.check)
