"""The verbs that need a model in memory, and how their words are read: by argparse and by the launcher.

Imports only what the interpreter has built in: the launcher pays for each import at every launch.
"""

from itertools import islice

LAUNCH_VERBS = ("chat", "run", "serve", "batch")
#: Options of these verbs that take no value; every other option takes one.
SWITCHES = frozenset(
    (
        *("--help", "--json", "--quiet", "--continue", "--plain", "--raw", "--timings"),
        *("--ollama", "--redact", "--any-user", "-h", "--help-all"),
    )
)
_OF_NO_VERB = ("-h", "--help", "--version")


def with_verb(typed: list[str]) -> list[str]:
    """Add `chat` where no verb was typed: `edgeinfer`, `edgeinfer --continue`."""
    has_verb = typed and (not typed[0].startswith("-") or typed[0] in _OF_NO_VERB)
    return typed if has_verb else ["chat", *typed]


def options_and_words(
    argv: list[str], switches: frozenset[str] = SWITCHES
) -> tuple[list[str], list[str]]:
    """Separate options, each followed by its value, from the words that may stand among them.

    What follows `--` is words, as is what starts with `-` and is a number, or has a space.
    """
    options: list[str] = []
    words: list[str] = []
    rest = iter(argv)
    for word in rest:
        if word == "--":
            words += rest
        elif word[:1] != "-" or word == "-" or word[1].isdigit() or " " in word.partition("=")[0]:
            words.append(word)
        else:
            options.append(word)
            if "=" not in word and word not in switches:
                options += islice(rest, 1)
    return options, words
