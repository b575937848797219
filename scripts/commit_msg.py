"""Check the subject of a commit message: `commit_msg.py FILE`, which pre-commit runs at each commit.

A subject has at most 72 characters, no full stop, and no word that scripts/words.toml refuses.
"""

from __future__ import annotations

import sys
from pathlib import Path

import style

LONGEST = 72


def findings(subject: str) -> list[str]:
    """Return the faults of a subject; an empty list if there are none."""
    faults = [f"“{word}”: {instead}" for word, instead in style.words(subject)]
    if len(subject) > LONGEST:
        faults.append(f"{len(subject)} characters; at most {LONGEST}")
    if subject.endswith("."):
        faults.append("the subject ends with a full stop")
    return faults


def main(argv: list[str]) -> int:
    """Print the faults of the message in the file `argv[0]`; return 1 if there are any."""
    subject = next(iter(Path(argv[0]).read_text("utf-8").splitlines()), "")
    if subject.startswith(("Merge ", "Revert ", "fixup! ", "squash! ")):
        return 0
    faults = findings(subject)
    for fault in faults:
        print(f"commit subject: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
