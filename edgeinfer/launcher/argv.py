"""Split the command lines of the verbs that load a model, for the launcher and for argparse."""

from __future__ import annotations

#: Verb that loads a model → number of words that must follow the name of the model. In `run WORD`, the
#: word is the prompt; in `run WORD WORD`, the first word is the model.
LAUNCH_VERBS = {"chat": 0, "run": 1, "serve": 0, "batch": 0}
#: Options of LAUNCH_VERBS that take no value; every other option of these verbs takes one.
SWITCHES = frozenset(
    (
        *("--help", "--json", "--quiet", "--continue", "--plain", "--raw", "--timings"),
        *("--ollama", "--tools", "-h", "--help-all", "--private", "--receipts"),
    )
)
_OF_NO_VERB = ("-h", "--help", "--version")
#: Longest model name (characters). A longer first word is a prompt.
_LONGEST_NAME = 200


def with_verb(typed: list[str]) -> list[str]:
    """Put the default verb `chat` before a command line without a verb, such as `--continue`."""
    has_verb = typed and (not typed[0].startswith("-") or typed[0] in _OF_NO_VERB)
    return typed if has_verb else ["chat", *typed]


def options_and_words(
    argv: list[str], switches: frozenset[str] = SWITCHES
) -> tuple[list[str], list[str]]:
    """Separate a command line into options, each followed by its value, and positional words.

    `["-n", "5", "hi", "--x=1"]` gives `["-n", "5", "--x=1"]` and `["hi"]`. Options in `switches` take
    no value. All words after `--` are positional. If an option that takes a value is directly before
    another option, its value is missing; argparse refuses that later.
    """
    options: list[str] = []
    positional: list[str] = []
    remaining = list(argv)
    while remaining:
        word = remaining.pop(0)
        if word == "--":
            return options, positional + remaining
        if not _is_option(word):
            positional.append(word)
            continue
        options.append(word)
        takes_value = "=" not in word and word not in switches
        if takes_value and remaining and not _is_option(remaining[0]):
            options.append(remaining.pop(0))
    return options, positional


def _is_option(word: str) -> bool:
    """Return whether argparse takes a word for an option: a dash, no number, no space in the name."""
    is_number = word[1:2] in tuple("0123456789.")
    return word[:1] == "-" and word != "-" and not is_number and " " not in word.partition("=")[0]


class CommandLine:
    """The parts of a verb's command line that the launcher needs."""

    def __init__(self, argv: list[str]) -> None:
        self.argv = argv
        self.verb = argv[0]
        options, self._positionals = options_and_words(argv[1:])
        self._values: dict[str, list[str]] = {}
        name = ""
        for word in options:
            if not _is_option(word):
                self._values[name].append(word)
                continue
            name, has_value, value = word.partition("=")
            self._values.setdefault(name, [])
            if has_value:
                self._values[name].append(value)

    def has(self, option: str) -> bool:
        return option in self._values

    def values(self, option: str) -> list[str]:
        return self._values.get(option, [])

    def value(self, option: str, default: object = "") -> str:
        """Return the last value of an option such as `--port`; `default` if it was not typed."""
        return (self.values(option) or [str(default)])[-1]

    @property
    def first_word(self) -> str:
        """Word that may name a model: the first one, for `batch` the value of `--model`.

        "" if there is none, or if it is longer than a name.
        """
        first = self.value("--model") if self.verb == "batch" else "".join(self._positionals[:1])
        return first if len(first) < _LONGEST_NAME else ""

    @property
    def named_model(self) -> str:
        """`first_word` if it must name a model; "" if it may be a prompt, as in `run WORD`."""
        return self.first_word if len(self._positionals) > LAUNCH_VERBS[self.verb] else ""
