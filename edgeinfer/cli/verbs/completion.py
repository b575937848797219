"""`edgeinfer completion SHELL`: print a shell's completion script, which asks this verb for words."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from edgeinfer.cli.parser import VERBS, build_parser, verbs_of
from edgeinfer.cli.result import Result
from edgeinfer.errors import UsageError
from edgeinfer.host import EngineHost
from edgeinfer.launcher.argv import options_and_words
from edgeinfer.platform import paths

#: Shells with a completion script in the folder `data`. The scripts call `edgeinfer completion words
#: …`, and complete file names if that prints nothing.
SHELLS = ("bash", "zsh", "fish")
#: Argument with which a shell's script asks for completions.
_WORDS = "words"


class CompletionResult(Result, frozen=True, kw_only=True):
    """A shell's completion script, or the completions of a word.

    Each completion is a line of `text`: a word, a tab, and the summary of the word.
    """

    shell: str
    text: str

    @property
    def exit_code(self) -> int:
        return 0 if self.text else 1

    def human(self) -> str:
        return self.text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", type=_shell, metavar="SHELL", help="bash, zsh or fish")
    typed = parser.add_argument("typed", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    typed.required = False  # argparse requires REMAINDER, but there may be no word


def _shell(text: str) -> str:
    if text not in (*SHELLS, _WORDS):
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(SHELLS)}")
    return text


def run(options: argparse.Namespace, _host: EngineHost) -> CompletionResult:
    """Return a shell's script, or the completions of the last word of `typed`."""
    shell: str = options.shell
    if shell in SHELLS:
        if options.typed:
            problem = f"unrecognized arguments: {' '.join(options.typed)}"
            raise UsageError(problem, hint=f"type `edgeinfer completion {shell}`")
        script = paths.shipped_file(f"completion.{shell}").read_text("utf-8")
        return CompletionResult(shell=shell, text=script.rstrip())
    *before, current = options.typed or [""]
    rows = _candidates(before, current)
    lines = [f"{word}\t{summary}" for word, summary in rows if word.startswith(current)]
    return CompletionResult(shell=shell, text="\n".join(lines))


def _candidates(before: list[str], current: str) -> Iterator[tuple[str, str]]:
    """Yield the words that may follow `before` on the command line, with their summaries."""
    if before in ([], ["help"]):
        yield from ((name, row.summary) for name, row in VERBS.items())
        return
    verb, *typed = before
    if verb not in VERBS:
        return
    parser = verbs_of(build_parser(verb))[verb]
    if actions := [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]:
        if not typed:
            yield from ((choice.dest, choice.help or "") for choice in actions[0]._choices_actions)
        elif typed[0] in actions[0].choices:
            parser = actions[0].choices[typed.pop(0)]
    flags = parser._option_string_actions
    option = flags.get(typed[-1]) if typed else None
    if option is not None and option.nargs != 0:
        yield from _values(option)
    elif current.startswith("-"):
        shown = [(flag, action) for flag, action in flags.items() if action.help != argparse.SUPPRESS]
        yield from ((flag, (action.help or "").replace("%%", "%")) for flag, action in shown)
    else:
        switches = frozenset(flag for flag, action in flags.items() if action.nargs == 0)
        _, positionals = options_and_words(typed, switches)
        yield from _values(_positional(parser, len(positionals)), only_here=verb in ("rm", "forget"))


def _positional(parser: argparse.ArgumentParser, index: int) -> argparse.Action | None:
    """Return the positional argument at `index` (the last may be repeated), None if there is none."""
    positionals = parser._get_positional_actions()
    repeated = bool(positionals) and positionals[-1].nargs in ("+", "*")
    if index < len(positionals) or repeated:
        return positionals[min(index, len(positionals) - 1)]
    return None


def _values(action: argparse.Action | None, *, only_here: bool = False) -> Iterator[tuple[str, str]]:
    if action is None or isinstance(action, argparse._SubParsersAction):
        return
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if action.choices:
        yield from ((str(choice), "") for choice in action.choices)
    elif metavar == "SHELL":
        yield from ((name, "") for name in SHELLS)
    elif metavar.startswith("MODEL"):
        yield from ((name, "") for name in _models(only_here=only_here))
    elif metavar.startswith("SNAPSHOT"):
        from edgeinfer.snapshot_format.storage import generations

        yield from ((name, "") for name in sorted(generations()))
    elif metavar.startswith("ADAPTER"):
        adapters = sorted(Path(paths.adapters_path()).glob("*.gguf"))
        yield from ((path.stem, "") for path in adapters)


def _models(*, only_here: bool) -> list[str]:
    from edgeinfer.models.catalog import load_catalog
    from edgeinfer.models.external_stores import stores
    from edgeinfer.models.store import list_pulled

    pulled = {model.name for model in list_pulled()}
    catalogued = () if only_here else load_catalog()
    return sorted({*catalogued, *pulled, *(model.name for model in stores.usable())})
