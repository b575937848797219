"""The parser of every verb: options anywhere among the words, our own errors, a help that fits."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from edgeinfer.arguments import times
from edgeinfer.arguments.verb import nearest
from edgeinfer.errors import UsageError
from edgeinfer.launch_verbs import options_and_words

#: More choices than this are not listed in an error.
_MOST_LISTED = 10


class Parser(argparse.ArgumentParser):
    """argparse with options anywhere, none abbreviated, that raises instead of exiting."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"run `{self.prog} --help`")

    def parse_known_args(  # type: ignore[override]  # typeshed: overloads
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse options and words in any order; what follows a verb or an agent is left as it is."""
        positionals = self._get_positional_actions()
        if any(action.nargs in (argparse.PARSER, argparse.REMAINDER) for action in positionals):
            return super().parse_known_args(args, namespace)
        flags = frozenset(
            flag for action in self._actions if action.nargs == 0 for flag in action.option_strings
        )
        options, words = options_and_words(list(args or ()), flags)
        return super().parse_known_args([*options, *(("--", *words) if words else ())], namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = list(map(str, action.choices))
        what = "/".join(action.option_strings) or action.metavar or action.dest
        meant = nearest(str(value), known)
        listed = f": one of {', '.join(known)}" if len(known) <= _MOST_LISTED else ""
        lists = f"`{self.prog} --help` lists them"
        raise UsageError(
            f"{value!r} is not a value of {what}{listed}",
            hint=f"did you mean {meant}? {lists}" if meant else lists,
        )

    def print_help(self, file: Any = None) -> None:
        """Print the help without the groups of options that `--help-all` adds."""
        every, self.usage = self._action_groups, self._short_usage()
        self._action_groups = [group for group in every if group.title not in times.FOLDED]
        self._print_message(self.format_help(), file or sys.stdout)
        self._action_groups, self.usage = every, None

    def _short_usage(self) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(None, self._get_positional_actions(), [], prefix="")
        return formatter.format_help().strip().replace(self.prog, f"{self.prog} [options]", 1)

    def format_help(self) -> str:
        """Write the help of the groups there are."""
        actions = [action for group in self._action_groups for action in group._group_actions]
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


class HelpAll(argparse.Action):
    """`--help-all`: the help with every group of options."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(parser.format_help(), end="")  # noqa: T201
        parser.exit()
