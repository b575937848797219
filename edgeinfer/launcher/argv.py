"""The verbs that need a model in memory, and their command lines, for argparse and the launcher.

Imports only built-in modules: the launcher pays for each import at every launch.
"""

from __future__ import annotations

from itertools import islice

#: Launch verb → how many words must follow the first word for that to be a model's name.
LAUNCH_VERBS = {"chat": 0, "run": 1, "serve": 0, "batch": 0}
#: Options of these verbs that take no value; every other option takes one.
SWITCHES = frozenset(
    (
        *("--help", "--json", "--quiet", "--continue", "--plain", "--raw", "--timings"),
        *("--ollama", "--tools", "-h", "--help-all", "--private", "--receipts"),
    )
)
_OF_NO_VERB = ("-h", "--help", "--version")
#: Longest model name (characters); a longer word is a prompt.
_LONGEST_NAME = 200


def with_verb(typed: list[str]) -> list[str]:
    """Add the default verb `chat` if none was typed: `edgeinfer`, `edgeinfer --continue`."""
    has_verb = typed and (not typed[0].startswith("-") or typed[0] in _OF_NO_VERB)
    return typed if has_verb else ["chat", *typed]


def options_and_words(
    argv: list[str], switches: frozenset[str] = SWITCHES
) -> tuple[list[str], list[str]]:
    """Separate options, each followed by its value, from the words between them.

    Words after `--` are positional, and so are words with `-` that are a number or contain a space.
    """
    options: list[str] = []
    positional: list[str] = []
    remaining = iter(argv)
    for word in remaining:
        if word == "--":
            positional += remaining
        elif word[:1] != "-" or word == "-" or word[1].isdigit() or " " in word.partition("=")[0]:
            positional.append(word)
        else:
            options.append(word)
            if "=" not in word and word not in switches:
                options += islice(remaining, 1)
    return options, positional


class CommandLine:
    """The command line of a launch verb, as far as the launcher reads it."""

    def __init__(self, argv: list[str]) -> None:
        self.verb = argv[0]
        options, self._words = options_and_words(argv[1:])
        self._values: dict[str, list[str]] = {}
        remaining = iter(options)
        for option in remaining:
            name, has_value, value = option.partition("=")
            values = self._values.setdefault(name, [])
            if has_value:
                values.append(value)
            elif name not in SWITCHES:
                values += islice(remaining, 1)

    def has(self, option: str) -> bool:
        return option in self._values

    def values(self, option: str) -> list[str]:
        return self._values.get(option, [])

    def value(self, option: str) -> str:
        """Return the last value typed for an option, "" if it was not typed."""
        return (self.values(option) or [""])[-1]

    @property
    def first_word(self) -> str:
        """First word, which may name a model, or the value of `batch`'s option; "" for none."""
        first = self.value("--model") if self.verb == "batch" else "".join(self._words[:1])
        return first if len(first) < _LONGEST_NAME else ""

    @property
    def named_model(self) -> str:
        """First word if it can only be a model, "" if it may be a prompt."""
        return self.first_word if len(self._words) > LAUNCH_VERBS[self.verb] else ""
