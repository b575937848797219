"""The Textual front end of the chat; `edgeinfer.chat` says and stores."""

from __future__ import annotations


def preload() -> None:
    """Import every part, parse every style and run the app once without a terminal.

    That makes the first paint cheap, in a process that will be parked. It leaves no thread, no
    descriptor, no file and no setting behind. About 1.2 s.
    """
    from edgeinfer.tui.rehearsal import rehearse

    rehearse()
